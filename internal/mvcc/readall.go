package mvcc

import (
	"fmt"
	"slices"

	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// batchRead is what ReadAll keeps from call to call.
type batchRead struct {
	buf    []byte // the internal keys, one behind the other
	keys   [][]byte
	finder storage.Finder
	value  []byte
}

// ReadAll reads many keys in the session's view, and calls visit once for each, in no certain order. Pages that are not in memory are
// read together. The value's data lives until visit returns.
func (x *Session) ReadAll(list [][]byte, visit func(i int, v Value) error) error {
	b := &x.batch
	if err := x.arrange(b, list); err != nil {
		return err
	}
	x.slot.Enter()
	defer x.slot.Leave()
	return x.reader.GetAll(&b.finder, b.keys, x.at, func(i int, v storage.Version, ok bool) error {
		out := Value{At: x.at}
		if ok {
			out.Await = x.store.mustAwait(v.Sync, v.Epoch)
			if v.Kind == keys.KindSet {
				var err error
				out.Found, out.Epoch = true, v.Epoch
				if out.Data, err = x.reader.Value(&b.value, v); err != nil {
					return err
				}
			}
		}
		return visit(i, out)
	})
}

// arrange builds the internal keys.
func (x *Session) arrange(b *batchRead, list [][]byte) error {
	size := 0
	for i, key := range list {
		if err := x.store.checkKey(key); err != nil {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
		size += len(key) + 1
	}
	b.buf = slices.Grow(b.buf[:0], size)
	b.keys = b.keys[:0]
	for _, key := range list {
		from := len(b.buf)
		b.buf = keys.Append(b.buf, keys.SpaceUser, key)
		b.keys = append(b.keys, b.buf[from:])
	}
	return nil
}
