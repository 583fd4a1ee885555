package offheap

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// TestPagesAreNotTouchedWithoutMemory: the pages of a mapping are touched one by one only if the kernel does not know the
// advice. After any other error a touch would end the process.
func TestPagesAreNotTouchedWithoutMemory(t *testing.T) {
	for _, c := range []struct {
		errno   error
		touched bool
	}{{nil, false}, {unix.EINVAL, true}, {unix.ENOMEM, false}, {unix.EFAULT, false}, {unix.EAGAIN, false}} {
		b := make([]byte, 3*pageBytes)
		for i := range b {
			b[i] = 1
		}
		err := populate(b, func([]byte, int) error { return c.errno })
		if want := c.errno != nil && !c.touched; (err != nil) != want || want && !errors.Is(err, c.errno) {
			t.Errorf("%v: got %v", c.errno, err)
		}
		if touched := b[pageBytes] == 0; touched != c.touched {
			t.Errorf("%v: touched %v, want %v", c.errno, touched, c.touched)
		}
	}
}

// TestPopulatedPagesAreZero uses the real kernel, with or without the advice.
func TestPopulatedPagesAreZero(t *testing.T) {
	b, err := unix.Mmap(-1, 0, 4*pageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	}()
	b[1] = 1
	if err := Populate(b[pageBytes:]); err != nil {
		t.Fatal(err)
	}
	if clear(b[1:2]); slices.Max(b) != 0 {
		t.Error("a page is not zero")
	}
}
