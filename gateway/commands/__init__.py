"""The subcommands of `loraplex`, one module each."""
