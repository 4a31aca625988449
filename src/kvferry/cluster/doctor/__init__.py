"""What ``kvferry doctor`` looks at: this machine, a link to another one, and a running cluster."""
