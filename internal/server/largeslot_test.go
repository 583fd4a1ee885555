package server

import "testing"

// TestALargeSlotHasOneOwner: nothing but what is in it changes or leaves it.
func TestALargeSlotHasOneOwner(t *testing.T) {
	var s largeSlot
	one, other := new(connection), new(connection)
	if !s.take(one, 10) || s.take(other, 10) || s.take(one, 10) {
		t.Fatal("it has not one owner")
	}
	if s.change(other, 10, 20) || s.change(one, 5, 20) || s.leave(other, 10) || s.leave(one, 5) || s.bytes() != 10 {
		t.Fatal("something else changes it")
	}
	if s.drop(other); !s.isOf(one) || s.isOf(other) {
		t.Fatal("whose is it?")
	}
	if !s.change(one, 10, 20) || s.bytes() != 20 || !s.leave(one, 20) || s.bytes() != 0 || s.leave(one, 20) {
		t.Fatal("its owner does not leave it")
	}
	if !s.take(other, 7) {
		t.Fatal("it is not free")
	}
	if s.drop(other); s.isOf(other) {
		t.Fatal("it was not dropped")
	}
}
