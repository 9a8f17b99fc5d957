"""The store on several independent Redis servers: a majority decides."""
