package keys

// LineBytes is two cache lines, which processors fetch together. Small buffers that grow from nothing lie beside those of other goroutines,
// and whoever writes his for every key then takes his neighbour's line away each time: scans by two sessions were slower than by one. The
// allocator hands out pieces of this size, and of its multiples up to a page, aligned to it: they share no line with anybody.
const LineBytes = 128

// Scratch is an empty buffer for a key or two that shares no line with others as long as it need not grow.
func Scratch() []byte { return make([]byte, 0, LineBytes) }
