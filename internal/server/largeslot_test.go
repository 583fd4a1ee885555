package server

import "testing"

// TestALargeSlotHasOneOwner: nothing but what is in it leaves it.
func TestALargeSlotHasOneOwner(t *testing.T) {
	var s largeSlot
	one, other := new(connection), new(connection)
	if !s.take(one, 10) || s.take(other, 10) || s.take(one, 10) {
		t.Fatal("it has not one owner")
	}
	if s.drop(other); s.leave(other, 10) || s.leave(one, 5) || s.bytes() != 10 {
		t.Fatal("something else leaves it")
	}
	if !s.leave(one, 10) || s.bytes() != 0 || s.leave(one, 10) {
		t.Fatal("its owner does not leave it")
	}
	if !s.take(other, 7) {
		t.Fatal("it is not free")
	}
	if s.drop(other); s.bytes() != 0 {
		t.Fatal("it was not dropped")
	}
}
