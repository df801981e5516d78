"""Documents, their chunks, and a store on disk that finds them again by words or by meaning."""
