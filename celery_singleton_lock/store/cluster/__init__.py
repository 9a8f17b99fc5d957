"""The store on a Redis Cluster."""
