package wal

import (
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// putOff is a log on which a large record has waited for buffers, and others have had so many segments since that its turn comes next. The buffers
// of waitingBytes are waited for until the test takes them away.
func putOff(t *testing.T) (a *appender, await func(bodyBytes int) bool) {
	options := testOptions(vfs.NewMem(), 64<<10)
	options.Buffers = 64
	a = mustStart(t, options)
	await = func(bodyBytes int) bool { // one attempt
		t.Helper()
		attempt := a.log.Prepare(bodyBytes, false)
		if attempt == nil {
			return true
		}
		within(t, attempt.Done(), "an attempt to prepare")
		if err := attempt.Err(); err != nil {
			t.Fatal(err)
		}
		return false
	}
	a.log.preparer.waiting.Add(waitingBytes)
	if await(turnLarge) {
		t.Fatal("the large record does not wait for buffers")
	}
	for range turnAfter {
		for !await(turnMedium) {
		}
		a.cur.Load().Seal()
		a.mustFollow(t, turnMedium)
	}
	return a, await
}

const waitingBytes, turnLarge, turnMedium = 1 << 20, 8 << 20, 100 << 10

// TestALargeRecordThatWaitsForBuffersHasItsTurn: others, which need fewer buffers, and for which its segment would do, cannot put it off for ever.
func TestALargeRecordThatWaitsForBuffersHasItsTurn(t *testing.T) {
	a, await := putOff(t)
	for range 3 {
		if await(turnMedium) {
			t.Fatal("another record has a segment, and the large one waits for buffers")
		}
	}
	a.log.preparer.waiting.Add(-waitingBytes)
	for a.turnBytes() == 0 {
		if await(turnMedium) {
			t.Fatal("another record has a segment, and it is the turn of the large one")
		}
	}
	if await(turnMedium) {
		t.Fatal("another record takes the segment of the large one")
	}
	if !await(turnLarge) {
		t.Fatal("the large record does not get its segment")
	}
	a.cur.Load().Seal()
	a.mustFollow(t, turnLarge)
	for !await(turnMedium) { // without an end if the turn had none
	}
	mustClose(t, a.log)
}

// TestATurnEndsWhenItsRecordDoesNotCome: its writer may have given up.
func TestATurnEndsWhenItsRecordDoesNotCome(t *testing.T) {
	a, await := putOff(t)
	a.log.preparer.waiting.Add(-waitingBytes)
	for a.turnBytes() == 0 {
		await(turnMedium)
	}
	attempts := 0
	for !await(turnMedium) {
		if attempts++; attempts > 2*turnAttemptsMax {
			t.Fatalf("others wait after %d attempts", attempts)
		}
	}
	if attempts == 0 {
		t.Error("others do not wait at all")
	}
	mustClose(t, a.log)
}

// turnBytes is the size of the segment whose turn it is, once that is made.
func (a *appender) turnBytes() int {
	s := a.log.preallocator
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.firstBytesLocked() != s.turns.size {
		return 0
	}
	return s.turns.size
}
