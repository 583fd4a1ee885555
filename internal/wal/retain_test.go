package wal

import "testing"

// TestRetainedBufferIsNotReused: a validation reads the records of a sealed segment while the flusher has written it to
// its end. Only the last reader gives the buffer to another segment, and no reader begins after that.
func TestRetainedBufferIsNotReused(t *testing.T) {
	l := &Log{buffers: &bufferPool{size: pageSize, max: 1}, refill: make(chan struct{}, 1)}
	buffer, err := l.buffers.take()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.buffers.free(); err != nil {
			t.Error(err)
		}
	}()
	s := &Segment{buffer: buffer, pooled: true}
	for range 2 {
		if !l.RetainBuffer(s) {
			t.Fatal("the buffer of an active segment is not retained")
		}
	}
	l.releaseBuffer(s, 64)
	if len(l.buffers.idle) != 0 {
		t.Error("the buffer is reused while two readers retain it")
	}
	if l.RetainBuffer(s) {
		t.Error("a released buffer is retained")
	}
	l.ReturnBuffer(s)
	if len(l.buffers.idle) != 0 {
		t.Error("the buffer is reused while a reader retains it")
	}
	l.ReturnBuffer(s)
	if len(l.buffers.idle) != 1 || len(l.refill) != 1 {
		t.Error("the last reader has not given the buffer back")
	}
}
