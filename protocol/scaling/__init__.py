"""Elastic replicas: operations that change how many there are, who owns what they run in, how one is drained."""
