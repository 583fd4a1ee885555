package wal

const (
	// turnAfter is how many oversized segments others get after a record has waited for buffers for the first time. Then it is its turn.
	turnAfter = 4
	// turnAttemptsMax is how many attempts, of a moment each, others wait until the record of the turn has taken its segment: its writer may have given up.
	turnAttemptsMax = 32
)

// turns lets the largest record that waits for buffers have a segment in the end. All that wait ask again at the same time: smaller records need fewer
// buffers, and take the segments that are made for larger ones, so that on a slow device it would wait for as long as they come. preallocator.mu guards it.
type turns struct {
	putOff int // size of the largest segment that has waited for buffers; zero without
	others int // oversized segments that were made since

	size     int // of the segment of the turn, which much smaller records do not take; zero without
	attempts int // that others have left to wait for it
}

// due is the size of the segment whose turn comes next, or zero.
func (t *turns) due() int {
	if t.others < turnAfter {
		return 0
	}
	return t.putOff
}

// wait notes that no buffers were there for a segment.
func (t *turns) wait(size int) { t.putOff = max(t.putOff, size) }

// made notes that an oversized segment is about to be made.
func (t *turns) made(size int) {
	switch due := t.due(); {
	case t.putOff == 0:
	case due == 0 || size < due:
		t.others++
	default:
		*t = turns{size: size, attempts: turnAttemptsMax}
	}
}

// taken notes that a record has taken a segment.
func (t *turns) taken(segment int) {
	if segment >= t.putOff {
		t.putOff, t.others = 0, 0
	}
	if segment == t.size {
		t.size = 0
	}
}

// keeps reports whether a segment is not for a record of some size.
func (t *turns) keeps(segment, size int) bool { return segment == t.size && size < t.size/2 }

// awaited reports whether others wait for the record of the turn, whose segment would be the next one with so many bytes, and counts an attempt.
func (t *turns) awaited(next int) bool {
	if t.size == 0 {
		return false
	}
	if t.attempts--; t.attempts <= 0 || next != t.size { // its segment could not be made
		t.size = 0
	}
	return t.size != 0
}
