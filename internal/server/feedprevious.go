package server

import (
	"bytes"
	"context"
	"errors"
	"slices"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// previousValue is the value of a key before a commit.
type previousValue struct {
	found       bool
	unavailable bool // it is not kept any more
	unread      bool // it was not read, or did not fit beside the others
	value       []byte
}

// previousValues are those of some operations of a commit. If they are few, they are read once for all watches, and left at the
// commit. Otherwise each watch reads those that it sends.
type previousValues struct {
	unavailable bool
	indexes     []int // of the operations, ascending; nil: they are all of the commit
	values      []previousValue
}

// previousSharedMax bounds the operations of a commit whose previous values are left at it.
const previousSharedMax = watchEventsMax

// previousReadMax is how many previous values are read at a time where they are large.
const previousReadMax = 32

func (p *previousValues) of(index int) previousValue {
	switch {
	case p == nil:
		return previousValue{unread: true}
	case p.unavailable:
		return previousValue{unavailable: true}
	case p.indexes == nil:
		return p.values[index]
	}
	if at, found := slices.BinarySearch(p.indexes, index); found {
		return p.values[at]
	}
	return previousValue{unread: true}
}

func (sw *streamWatch) wantsPrevious() bool {
	return sw.options.values == pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS
}

// previousOf reads the previous values of a part of a commit from one operation on, as far as there is room for them beside each other.
func (w *watchStream) previousOf(ctx context.Context, p *feed.Part, from int) (*previousValues, error) {
	c := p.Commit
	if there, ok := c.Attached().(*previousValues); ok {
		return there, nil
	}
	most, shared, count := previousReadMax, false, p.Count()
	if from == p.First() {
		most = watchEventsMax
		if shared = !p.Copied && c.Count() <= previousSharedMax; shared {
			count = c.Count()
		}
	}
	out := &previousValues{values: make([]previousValue, 0, count)} // and not of what is between the operations of the part
	var list [][]byte
	var values []*previousValue
	add := func(key []byte) {
		out.values = append(out.values, previousValue{})
		if v := &out.values[len(out.values)-1]; len(key) > 0 && key[0] == byte(keys.SpaceUser) {
			v.unread = true
			if len(list) < most {
				list, values = append(list, keys.User(key)), append(values, v)
			}
		}
	}
	if shared {
		for i := range count {
			add(c.Operation(i).Key)
		}
	} else {
		out.indexes = make([]int, 0, count)
		for i, op := range p.Operations {
			if i >= from {
				out.indexes = append(out.indexes, i)
				add(op.Key)
			}
		}
	}
	size, err := w.readPrevious(ctx, c.Epoch-1, list, values)
	if errors.As(err, new(*mvcc.SnapshotGoneError)) {
		return &previousValues{unavailable: true}, nil
	}
	if err == nil && shared && !slices.ContainsFunc(out.values, func(v previousValue) bool { return v.unread }) {
		return c.Attach(out, int64(size+40*len(out.values))).(*previousValues), nil
	}
	return out, err
}

// readPrevious reads keys at the epoch before a commit, and returns how much memory the values take: at most half a response, and
// half of one for the first. What does not fit stays unread.
func (w *watchStream) readPrevious(ctx context.Context, at keys.Epoch, list [][]byte, out []*previousValue) (size int, err error) {
	if at == 0 || len(list) == 0 {
		for _, v := range out {
			v.unread = false
		}
		return 0, nil
	}
	x, err := w.server.store.Session()
	if err != nil {
		return 0, err
	}
	defer x.Close()
	if _, err := x.OpenSnapshot(at); err != nil {
		return 0, err
	}
	large, most := false, w.responseLimit()/2
	x.AdmitLarge(func(bytes int) error {
		if large = bytes > most; large {
			return mvcc.ErrNotCopied
		}
		return nil
	})
	err = x.ReadAll(ctx, list, func(i int, v mvcc.Value) error {
		if fits := len(v.Data) <= most && (i == 0 || size+len(v.Data) <= most); fits && !large {
			*out[i] = previousValue{found: v.Found, value: bytes.Clone(v.Data)}
			size += len(v.Data)
		}
		large = false
		return nil
	})
	return size, err
}

// largePrevious reads one previous value when there is room for it beside the value. It reports false if the watch has ended.
func (w *watchStream) largePrevious(ctx context.Context, sw *streamWatch, e keys.Epoch, op batch.Op) (v previousValue, ok bool, err error) {
	size, err := w.previousSize(sw, e, op.Key)
	if err != nil {
		return v, false, w.end(ctx, sw, err)
	}
	if size += eventBytes + len(op.Key) + len(op.Value); w.room == nil || size > w.room.bytes {
		if ok, err := w.charge(ctx, sw, size); !ok {
			return v, false, err
		}
	}
	if v, err = w.readOnePrevious(e, op.Key, nil); err != nil {
		return v, false, w.end(ctx, sw, err)
	}
	return v, true, nil
}

// errSized ends a read that was to find out how large a value is.
var errSized = errors.New("the size of the value is known")

// previousSize is the size of the previous value of an operation that a watch wants, which is not copied if it is large.
func (w *watchStream) previousSize(sw *streamWatch, e keys.Epoch, key []byte) (size int, err error) {
	if !sw.wantsPrevious() || len(key) == 0 || key[0] != byte(keys.SpaceUser) {
		return 0, nil
	}
	v, err := w.readOnePrevious(e, key, func(bytes int) error { size = bytes; return errSized })
	if err != nil && !errors.Is(err, errSized) {
		return 0, err
	}
	return max(size, len(v.value)), nil
}

// readOnePrevious reads what an operation of a commit has replaced; admit may refuse a large value before it is copied.
func (w *watchStream) readOnePrevious(e keys.Epoch, key []byte, admit func(bytes int) error) (v previousValue, err error) {
	if e <= 1 {
		return v, nil
	}
	x, err := w.server.store.Session()
	if err != nil {
		return v, err
	}
	defer x.Close()
	x.AdmitLarge(admit)
	read, err := x.Get(nil, keys.User(key), e-1)
	if errors.As(err, new(*mvcc.SnapshotGoneError)) {
		return previousValue{unavailable: true}, nil
	}
	return previousValue{found: read.Found, value: read.Data}, err
}
