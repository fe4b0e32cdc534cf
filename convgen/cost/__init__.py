"""What a schedule costs on a machine: exact traffic, collectives in alpha and beta, a roofline for local work."""
