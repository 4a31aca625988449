"""Other connectors of vLLM with a patch, for benchmarks only: engines load them by ``kv_connector_module_path``.

Whatever is measured of one of these has to be labelled "patched".
"""
