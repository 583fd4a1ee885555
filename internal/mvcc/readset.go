package mvcc

import (
	"bytes"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// readSet is what a validated commit read and needs unchanged: at its snapshot, single keys and ranges of internal keys. Its
// buffers are reused, so that a retried transaction allocates nothing.
type readSet struct {
	at         keys.Epoch
	buf        []byte             // the keys, one after the other
	points     []span             // keys
	ranges     []bounds           // [lower, upper)
	validation storage.Validation // see Session.validate
	checked    keys.Epoch         // nothing that was read has changed up to this epoch
	windowKeys int                // keys that the window has checked
	err        ConflictError      // the one error a session reports at a time; reused
}

// span is a part of a buffer, as offsets, because the buffer moves when it grows.
type span struct{ from, to int }

type bounds struct{ lower, upper span }

// init makes the first buffers, which share no cache line with those of other sessions (see keys.LineBytes).
func (r *readSet) init() {
	r.buf, r.points = keys.Scratch(), make([]span, 0, keys.LineBytes/16)
}

func (r *readSet) reset(at keys.Epoch) {
	if r.held() > pooledBytesMax {
		*r = readSet{err: r.err} // which the caller may be reading now
	}
	r.at, r.checked, r.validation, r.windowKeys = at, at, storage.Validation{}, 0
	r.buf, r.points, r.ranges = r.buf[:0], r.points[:0], r.ranges[:0]
}

func (r *readSet) copy(key []byte) span {
	from := len(r.buf)
	r.buf = append(r.buf, key...)
	return span{from, len(r.buf)}
}

// addPoint remembers an internal key. Reading one key again and again in a row counts once.
func (r *readSet) addPoint(key []byte) {
	if n := len(r.points); n > 0 && string(r.key(r.points[n-1])) == string(key) {
		return
	}
	r.points = append(r.points, r.copy(key))
}

func (r *readSet) addRange(lower, upper []byte) {
	r.ranges = append(r.ranges, bounds{r.copy(lower), r.copy(upper)})
}

func (r *readSet) key(s span) []byte { return r.buf[s.from:s.to] }

// sort brings points and ranges in order, and joins ranges that overlap, so that a binary search
// finds whether a key is among them.
func (r *readSet) sort() {
	if len(r.points) > 1 {
		slices.SortFunc(r.points, func(a, b span) int { return bytes.Compare(r.key(a), r.key(b)) })
	}
	if len(r.ranges) < 2 {
		return
	}
	slices.SortFunc(r.ranges, func(a, b bounds) int { return bytes.Compare(r.key(a.lower), r.key(b.lower)) })
	joined := r.ranges[:1]
	for _, b := range r.ranges[1:] {
		last := &joined[len(joined)-1]
		switch {
		case bytes.Compare(r.key(b.lower), r.key(last.upper)) > 0:
			joined = append(joined, b)
		case bytes.Compare(r.key(b.upper), r.key(last.upper)) > 0:
			last.upper = b.upper
		}
	}
	r.ranges = joined
}

// has reports whether an internal key was read, by itself or in a range. The read set is sorted.
func (r *readSet) has(key []byte) bool {
	if r.hasPoint(key) {
		return true
	}
	lo, hi := 0, len(r.ranges) // the first range that begins after the key
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); bytes.Compare(r.key(r.ranges[mid].lower), key) <= 0 {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo > 0 && bytes.Compare(key, r.key(r.ranges[lo-1].upper)) < 0
}

func (r *readSet) hasPoint(key []byte) bool {
	lo, hi := 0, len(r.points)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		switch c := bytes.Compare(r.key(r.points[mid]), key); {
		case c == 0:
			return true
		case c < 0:
			lo = mid + 1
		default:
			hi = mid
		}
	}
	return false
}

func (r *readSet) size() int { return len(r.buf) + 32*len(r.ranges) + 16*len(r.points) }

// held is the memory of the read set, in bytes.
func (r *readSet) held() int { return cap(r.buf) + 32*cap(r.ranges) + 16*cap(r.points) }

// conflict fills the read set's error.
func (r *readSet) conflict(internal []byte, epoch keys.Epoch) error {
	r.err.Key = append(r.err.Key[:0], keys.User(internal)...)
	r.err.Epoch = epoch
	return &r.err
}
