package keys

import (
	"testing"
	"unsafe"
)

// TestScratchSharesNoLine makes many buffers, between other small ones.
func TestScratchSharesNoLine(t *testing.T) {
	var kept [][]byte
	for range 1000 {
		b := Scratch()
		if at := uintptr(unsafe.Pointer(unsafe.SliceData(b))); at%LineBytes != 0 || cap(b)%LineBytes != 0 {
			t.Fatalf("a buffer of %d bytes at %#x", cap(b), at)
		}
		kept = append(kept, b, make([]byte, 0, 24))
	}
	if len(kept) != 2000 {
		t.Fatal("the buffers were dropped")
	}
}
