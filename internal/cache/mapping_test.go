package cache

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestAMappingIsReleasedOnce: the second time, the addresses may be another's.
func TestAMappingIsReleasedOnce(t *testing.T) {
	m, err := reserveMapping(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if first, second := m.release(), m.release(); first != nil || !errors.Is(second, unix.EINVAL) {
		t.Errorf("released: %v, and again: %v", first, second)
	}
}
