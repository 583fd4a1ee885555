package keys

// LineBytes is two cache lines, which processors fetch together. A small buffer that grows from
// nothing is next to the buffers of other goroutines. A goroutine that writes to its buffer for
// every key then takes the line of its neighbour away each time: scans by two sessions were slower
// than by one. The allocator aligns pieces of this size, and of its multiples up to a page, to it,
// so that they share no line.
const LineBytes = 128

// Scratch is an empty buffer for a key or two that shares no cache line with others as long as it
// does not grow.
func Scratch() []byte { return make([]byte, 0, LineBytes) }
