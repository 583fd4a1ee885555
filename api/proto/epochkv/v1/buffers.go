package epochkvv1

import (
	"math/bits"
	"sync"

	"google.golang.org/grpc/mem"
)

// Buffers is the pool of the buffers into which the Codec encodes: a sync.Pool for each power of two
// from 1 KiB to 1 MiB. A buffer has less than twice the bytes that were asked for, and what was in it
// before. The default pool of gRPC rounds everything above 32 KiB up to 1 MiB, and clears it: a
// thousand streams, each with a response of 64 KiB that waits for its client, held 1 GiB by that.
var Buffers mem.BufferPool = new(buffers)

const (
	bufferBitsMin = 10
	bufferBitsMax = 20
)

type buffers [bufferBitsMax - bufferBitsMin + 1]sync.Pool

// Get implements mem.BufferPool. Buffers above 1 MiB are not pooled.
func (p *buffers) Get(length int) *[]byte {
	class := max(bits.Len(uint(max(length, 1)-1)), bufferBitsMin) - bufferBitsMin
	if class >= len(p) {
		b := make([]byte, length)
		return &b
	}
	if b, ok := p[class].Get().(*[]byte); ok {
		*b = (*b)[:length]
		return b
	}
	b := make([]byte, length, 1<<(class+bufferBitsMin))
	return &b
}

// BufferBytes is the memory that a buffer of Buffers takes for so many bytes.
func BufferBytes(length int) int {
	if length > 1<<bufferBitsMax {
		return length
	}
	return 1 << max(bits.Len(uint(max(length, 1)-1)), bufferBitsMin)
}

// Put implements mem.BufferPool. It leaves a buffer of another size to the collector.
func (p *buffers) Put(b *[]byte) {
	if n := cap(*b); n >= 1<<bufferBitsMin && n <= 1<<bufferBitsMax && n&(n-1) == 0 {
		p[bits.Len(uint(n))-1-bufferBitsMin].Put(b)
	}
}
