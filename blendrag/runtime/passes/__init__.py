"""The worker side: forwards over chosen rows, and the stored KV that they attend to."""
