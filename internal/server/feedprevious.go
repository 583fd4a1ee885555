package server

import (
	"bytes"
	"context"
	"errors"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// previousValue is the value of a key before a commit.
type previousValue struct {
	found       bool
	unavailable bool // it is not kept any more
	unread      bool // it is too large for those that are read at once, and is read when it is sent
	value       []byte
}

// previousValues are those of the operations of a commit. They are read once for all watches, and left at the commit.
type previousValues struct {
	unavailable bool
	values      []previousValue // by operation, from first on; nil if no watch wants them
	first       int
}

// previousSharedMax bounds the operations of a commit whose previous values are left at it. Of a larger commit, and of one that
// is too large to be kept, each watch reads those of the part that it sends.
const previousSharedMax = watchEventsMax

// previousBytesMax bounds the previous values that are in memory for a part of a commit.
const previousBytesMax = 4 * watchResponseBytes

func (p *previousValues) of(index int) previousValue {
	switch {
	case p == nil:
		return previousValue{}
	case p.unavailable:
		return previousValue{unavailable: true}
	}
	return p.values[index-p.first]
}

// previousOf reads the previous values that a watch wants of a part of a commit.
func (w *watchStream) previousOf(ctx context.Context, sw *streamWatch, p *feed.Part) (*previousValues, error) {
	c := p.Commit
	if sw.options.values != pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS || c.Loaded != nil {
		return nil, nil
	}
	if there, ok := c.Attached().(*previousValues); ok {
		return there, nil
	}
	shared := !p.Copied && c.Count() <= previousSharedMax
	var list [][]byte
	var indexes []int
	add := func(i int, key []byte) {
		if len(key) > 0 && key[0] == byte(keys.SpaceUser) {
			list, indexes = append(list, keys.User(key)), append(indexes, i)
		}
	}
	first, end := 0, c.Count()
	if shared {
		for i := range end {
			add(i, c.Operation(i).Key)
		}
	} else {
		first, end = p.Span()
		for i, op := range p.Operations {
			add(i-first, op.Key)
		}
	}
	previous := &previousValues{values: make([]previousValue, end-first), first: first}
	size, err := w.readPrevious(ctx, c.Epoch-1, list, indexes, previous)
	if err != nil || !shared {
		return previous, err
	}
	there, _ := c.Attach(previous, int64(size)).(*previousValues)
	return there, nil
}

// previousAt is the previous value of one operation. A large one is read when there is memory for it.
func (w *watchStream) previousAt(ctx context.Context, sw *streamWatch, c *feed.Commit, previous *previousValues, index int, key []byte) (previousValue, error) {
	v := previous.of(index)
	if !v.unread {
		return v, nil
	}
	size, err := w.previousSize(sw, c.Epoch, key)
	if err == nil && size > w.answer.bytes {
		err = w.charge(ctx, size)
	}
	if err != nil {
		return v, err
	}
	return w.readOnePrevious(c.Epoch, key, nil)
}

// errSized ends a read that was to find out how large a value is.
var errSized = errors.New("the size of the value is known")

// previousSize is the size of the previous value of an operation that a watch wants, which is not copied if it is large.
func (w *watchStream) previousSize(sw *streamWatch, e keys.Epoch, key []byte) (size int, err error) {
	if sw.options.values != pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS || len(key) == 0 || key[0] != byte(keys.SpaceUser) {
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

// readPrevious reads keys at the epoch before a commit, and returns how much memory that took.
func (w *watchStream) readPrevious(ctx context.Context, at keys.Epoch, list [][]byte, indexes []int, out *previousValues) (size int, err error) {
	size = 40 * len(out.values)
	if at == 0 {
		return size, nil
	}
	x, err := w.server.store.Session()
	if err != nil {
		return 0, err
	}
	defer x.Close()
	_, err = x.OpenSnapshot(at)
	if errors.As(err, new(*mvcc.SnapshotGoneError)) {
		out.unavailable, out.values = true, nil
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	err = x.ReadAll(ctx, list, func(i int, v mvcc.Value) error {
		switch read := size - 40*len(out.values); {
		case !v.Found:
		case read+len(v.Data) > previousBytesMax:
			out.values[indexes[i]].unread = true
		default:
			out.values[indexes[i]] = previousValue{found: true, value: bytes.Clone(v.Data)}
			size += len(v.Data)
		}
		return nil
	})
	return size, err
}
