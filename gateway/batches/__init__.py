"""Files that tenants keep here, and batches of requests that run over them in what is left over."""
