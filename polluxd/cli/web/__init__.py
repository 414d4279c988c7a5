"""`polluxctl web`: a live page of the jobs and the cluster. It reads, and changes nothing."""
