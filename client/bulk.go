package client

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// bulkMessageBytes is how much of a bulk load one message holds: large enough that the cost of a
// message does not matter, small enough that the server works while the next one is filled.
const bulkMessageBytes = 256 << 10

// BulkLoad loads many keys at once without the server's log and memtables. They become visible and
// durable together, at one epoch, when Commit has returned, or not at all. It is for one goroutine.
type BulkLoad struct {
	stream  grpc.ClientStreamingClient[kvpb.BulkLoadRequest, kvpb.BulkLoadResponse]
	cancel  context.CancelFunc
	request kvpb.BulkLoadRequest
	entries []*kvpb.BulkEntry // all that were made; later messages reuse them
	arena   []byte            // their bytes
	failed  error
}

// BulkLoaded is the outcome of a bulk load.
type BulkLoaded struct {
	Epoch Epoch
	Keys  uint64 // distinct ones
}

// BulkLoad begins a bulk load, which Commit or Close ends. Only ctx bounds it. Keys in ascending
// order load fastest. If a key is put several times, its last value counts.
func (c *Client) BulkLoad(ctx context.Context) (*BulkLoad, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.kv.BulkLoad(ctx)
	if err != nil {
		cancel()
		return nil, newError(err)
	}
	return &BulkLoad{stream: stream, cancel: cancel}, nil
}

// Put adds a key. It keeps neither slice. An error ends the bulk load.
func (l *BulkLoad) Put(key, value []byte) error {
	if l.failed != nil {
		return l.failed
	}
	n := len(l.request.Entries)
	if n == len(l.entries) {
		l.entries = append(l.entries, new(kvpb.BulkEntry))
	}
	e := l.entries[n]
	from := len(l.arena)
	l.arena = append(append(l.arena, key...), value...)
	e.Key, e.Value = l.arena[from:from+len(key):from+len(key)], l.arena[from+len(key):len(l.arena):len(l.arena)]
	l.request.Entries = append(l.request.Entries, e)
	if len(l.arena) < bulkMessageBytes {
		return nil
	}
	return l.send()
}

// send sends the collected entries.
func (l *BulkLoad) send() error {
	err := l.stream.Send(&l.request)
	l.request.Entries, l.arena = l.request.Entries[:0], l.arena[:0]
	if errors.Is(err, io.EOF) { // the server has ended the stream; the answer says why
		_, err = l.stream.CloseAndRecv()
	}
	if err != nil {
		l.failed = newError(err)
	}
	return l.failed
}

// Commit completes the bulk load. After an error whose OutcomeUnknown is false nothing was loaded.
func (l *BulkLoad) Commit() (BulkLoaded, error) {
	defer l.cancel()
	l.request.Commit = true
	if l.failed == nil {
		_ = l.send() // l.failed has it
	}
	if l.failed != nil {
		return BulkLoaded{}, l.failed
	}
	response, err := l.stream.CloseAndRecv()
	if err != nil {
		return BulkLoaded{}, newError(err)
	}
	return BulkLoaded{Epoch: Epoch(response.GetEpoch()), Keys: response.GetKeys()}, nil
}

// Close cancels the bulk load unless it was committed.
func (l *BulkLoad) Close() { l.cancel() }
