"""Training side: checkpoints and exports that serving replicas load."""
