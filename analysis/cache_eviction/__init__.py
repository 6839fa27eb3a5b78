"""Which eviction policy keeps what the next predictions need, judged by exact effect (docs/eviction.md [ours])."""
