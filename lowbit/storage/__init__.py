"""Storage for offloaded bytes: scratch directories, mapped files, offload targets, and traffic statistics."""
