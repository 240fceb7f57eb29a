"""`python -m gateway` is the `loraplex` command."""

from gateway.cli import main

main()
