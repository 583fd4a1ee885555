package config

// Inflight is the bound of requests and answers in flight. Unless it is given it grows with the memory, and lets the largest batch pass.
func (c *Config) Inflight() Size {
	if c.Limits.InflightBytes != 0 {
		return c.Limits.InflightBytes
	}
	return max(c.Memory/4, c.Limits.BatchSize)
}

// What connections and streams take of the bound, at most: a connection a buffer of 32 KiB to read, its goroutines and tables, and StreamsOwn
// streams; a stream its goroutine and tables (4 KiB as measured) and up to 8 KiB of metadata.
const (
	connectionBytes = 64 * KiB
	streamBytes     = 12 * KiB
	// StreamsOwn is how many streams each connection may have whatever others do.
	StreamsOwn = 2
)

// carried is the part of the bound that is for connections and streams.
func (c *Config) carried() Size { return 72*MiB + c.Memory/8 }

// connectionsMax is how many connections the bound of resident memory carries, with a stream for every second of them beside their own.
func (c *Config) connectionsMax() int { return int(c.carried() / (connectionBytes + streamBytes/2)) }

// StreamsTotal is how many streams may be open on all connections together, beside StreamsOwn of each: what --max-connections leave.
func (c *Config) StreamsTotal() int {
	return int((c.carried() - Size(c.Limits.Connections)*connectionBytes) / streamBytes)
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
