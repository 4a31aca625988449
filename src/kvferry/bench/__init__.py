"""What `kvferry bench` measures."""
