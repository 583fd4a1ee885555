package config

import "cmp"

// Inflight is the bound of requests and answers in flight. By default it grows with the memory and
// admits the largest batch.
func (c *Config) Inflight() Size {
	if c.Limits.InflightBytes != 0 {
		return c.Limits.InflightBytes
	}
	return max(c.Memory/4, c.Limits.BatchSize)
}

// The most that connections and streams use of the bound. A connection uses a read buffer of 32
// KiB, its goroutines and tables, and StreamsOwn streams. A stream uses its goroutine and tables (4
// KiB as measured) and up to 8 KiB of metadata.
const (
	connectionBytes = 64 * KiB
	streamBytes     = 12 * KiB
	// StreamsOwn is how many streams each connection may always have.
	StreamsOwn = 2
)

// carried is the part of the bound that is for connections and streams.
func (c *Config) carried() Size { return 72*MiB + c.Memory/8 }

// connectionsMax is how many connections fit into the bound of resident memory, with one more
// stream for every second connection than its own.
func (c *Config) connectionsMax() int { return int(c.carried() / (connectionBytes + streamBytes/2)) }

// StreamsTotal is how many streams may be open on all connections together, in addition to
// StreamsOwn of each connection: what --max-connections leaves of the bound.
func (c *Config) StreamsTotal() int {
	return int((c.carried() - Size(c.Limits.Connections)*connectionBytes) / streamBytes)
}

// Resident memory in addition to --memory. A quarter of --memory is for garbage and requests in
// flight.
const (
	// memoryFixed is the program, stacks, buffers of connections, and garbage of Go's heap.
	memoryFixed = 96 * MiB
	// batchCopies is how many copies of the largest batch exist while it is received, decoded, and
	// written to the log.
	batchCopies = 3
)

// OperationBytes is the most that an operation of a batch takes in memory beside its key and value:
// messages, slices that have doubled, the batch and the result of an Invoke. Smaller kinds take less.
// One request is admitted whatever it takes, beside the share of others.
const OperationBytes = 896

// InvokeBytes is the most that an InvokeAll may have, read and write, each with mvcc.InvokeOperationBytes for its operations: a copy of the largest
// request in the bound.
func (c *Config) InvokeBytes() Size {
	return max(c.Limits.BatchSize, OperationBytes*Size(c.Limits.BatchOps)/batchCopies)
}

// WatchResponseBytes is what the responses of all streams of watches take together while their clients
// take nothing.
const WatchResponseBytes = 64 * MiB

// WatchBytes is what one of --max-watches takes. A watch with many or long ranges counts as several.
const WatchBytes = KiB

// WatchMemory is the part of the bound that is for watches: none of it is used before there is one.
// Commits are decoded one by one, and the largest one may exceed --feed-memory. A value and what it has replaced may be sent beside the share
// of watches, and be what is left of the response before, whose client did not take it in time.
func (c *Config) WatchMemory() Size {
	return max(c.Feed.Memory, c.Limits.BatchSize) + WatchResponseBytes + Size(c.Feed.Watches)*WatchBytes + 4*c.Limits.ValueSize
}

// TxnSize is the most that one transaction may hold.
func (c *Config) TxnSize() Size { return cmp.Or(c.Limits.TxnSize, c.Limits.BatchSize) }

// TransactionMemory is the part of the bound that is for open interactive transactions: none of it is used before there is one. They share as much
// as requests and answers. The one beside the share may be too large by its last request, until its client rolls back.
func (c *Config) TransactionMemory() Size { return c.Inflight() + min(2*c.TxnSize(), c.Inflight()) }

// LeaseBytes is what a lease takes in memory at most, with the longest owner.
const LeaseBytes = 640

// LeaseMemory is the part of the bound that is for leases: none of it is used before there is one.
func (c *Config) LeaseMemory() Size { return Size(c.Limits.Leases) * LeaseBytes }

// MemoryBound is the bound of the server's resident memory with either transport, whatever its clients do. docs/operations.md states it.
func (c *Config) MemoryBound() Size {
	return c.memoryOfRequests() + c.WatchMemory() + c.TransactionMemory() + c.LeaseMemory()
}

// largest is what the largest request takes.
func (c *Config) largest() Size {
	return max(batchCopies*c.Limits.BatchSize, OperationBytes*Size(c.Limits.BatchOps))
}

// memoryOfRequests is the bound while there is neither a watch, an open interactive transaction nor a lease.
func (c *Config) memoryOfRequests() Size {
	return c.Memory + max(c.Memory/4, c.Limits.InflightBytes) + memoryFixed + c.largest() + c.TLS.memory(c.Limits.Connections) + c.Traces.memory() + c.Archive.memory(c.Limits.BatchSize)
}

// HeapKept bounds how far the limit of the heap follows what stays there for long and has no term of its own. It is what the bound leaves beside
// --memory and the largest request.
func (c *Config) HeapKept() Size {
	return c.memoryOfRequests() - c.Memory - c.largest() - c.Archive.memory(c.Limits.BatchSize)
}
