"""The worker half: forwards over chosen rows, and the stored KV that they attend to."""
