package main

import (
	"context"
	"io"
)

// interruptibleBytes is how much one read of standard input asks for.
const interruptibleBytes = 64 << 10

// interruptible reads standard input until ctx ends. A read of a terminal, or of a pipe whose other end is silent, does not end with a
// signal, so it is done by a goroutine, which is left to itself when ctx ends.
type interruptible struct {
	ctx context.Context
	in  io.Reader

	buffer  []byte // of the goroutine during a read
	read    []byte // of buffer: what was read and not taken yet
	failed  error  // comes after it
	results chan result
}

// result is the answer to one read.
type result struct {
	bytes int
	err   error
}

// Read implements io.Reader.
func (r *interruptible) Read(p []byte) (int, error) {
	if len(r.read) == 0 && r.failed == nil && len(p) > 0 {
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.read)
	if r.read = r.read[n:]; len(r.read) == 0 {
		return n, r.failed
	}
	return n, nil
}

// fill waits for the next bytes. After its error, which is the end of ctx, the buffer belongs to the goroutine.
func (r *interruptible) fill() error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	if r.buffer == nil {
		r.buffer, r.results = make([]byte, interruptibleBytes), make(chan result, 1)
	}
	go func() {
		n, err := r.in.Read(r.buffer)
		r.results <- result{n, err}
	}()
	select {
	case got := <-r.results:
		r.read, r.failed = r.buffer[:got.bytes], got.err
		return nil
	case <-r.ctx.Done():
		return context.Cause(r.ctx)
	}
}
