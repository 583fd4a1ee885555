package config

// Inflight is the bound of requests and answers in flight. Unless it is given it grows with the memory, and lets the largest batch pass.
func (c *Config) Inflight() Size {
	if c.Limits.InflightBytes != 0 {
		return c.Limits.InflightBytes
	}
	return max(c.Memory/4, c.Limits.BatchSize)
}

// What resident memory may come to beside --memory. The quarter is for garbage and what is in flight.
const (
	// memoryFixed is the program, stacks, buffers of connections, and what the collector has not come to yet.
	memoryFixed = 96 * MiB
	// batchCopies is how often the largest batch is in memory while it is received, decoded, and written to the log.
	batchCopies = 3
)

// MemoryBound is what the server's resident memory stays within, whatever its clients do. docs/operations.md states it.
func (c *Config) MemoryBound() Size {
	return c.Memory + max(c.Memory/4, c.Limits.InflightBytes) + memoryFixed + batchCopies*c.Limits.BatchSize
}
