"""The operator's side: command line, terminal UI and, in `fleet`, the connections to the agents."""
