package tree

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// The origin's parameters: rows of a batch, and bytes of a page.
const (
	rowsPerBatch  = 200
	batchPageSize = 4096
)

// shortest is the least length of an entry whose greatest is the point on the axis.
var shortest = map[int]int{104: 44, 340: 140, 740: 340, 1240: 740, 32_000: 100}

// inserts puts rows into a tree of 4 KiB pages, in memory, batch by batch.
type inserts struct {
	insert func(*memory, btree.Root, []btree.Entry) (btree.Root, error)
}

// singles inserts row after row: one descent and one rewritten path each.
func singles(m *memory, root btree.Root, rows []btree.Entry) (_ btree.Root, err error) {
	for i := range rows {
		if root, err = m.put(root, rows[i:i+1]); err != nil {
			return root, err
		}
	}
	return root, nil
}

// sortInvokeAll sorts the batch and reads, modifies and writes in one descent.
func sortInvokeAll(m *memory, root btree.Root, rows []btree.Entry) (btree.Root, error) {
	names, values := sorted(rows)
	next := 0
	result, err := invokeAll(context.Background(), m.input(root, 1), names, rows[0].Trailer.Epoch(),
		func(key []byte, _ btree.Version, _ bool) btree.Version {
			for !bytes.Equal(names[next], key) { // keys come in order, once each
				next++
			}
			return btree.Version{Kind: keys.KindSet, Value: values[next]}
		})
	return m.settle(result, err)
}

// sortFindPut sorts the batch, looks all keys up, places the rows that no leaf takes, and puts all entries.
func sortFindPut(m *memory, root btree.Root, rows []btree.Entry) (btree.Root, error) {
	names, values := sorted(rows)
	found := 0
	var finder btree.Finder
	err := finder.FindAll(m, root, names, keys.MaxEpoch, func(_ int, _ btree.Version, ok bool) error {
		if ok {
			found++
		}
		return nil
	})
	if err != nil {
		return root, err
	}
	batch := make([]btree.Entry, len(names))
	for i, name := range names {
		batch[i] = btree.Entry{Key: name, Value: values[i], Trailer: rows[0].Trailer}
		if len(values[i]) > page.InlineMax(m.size) {
			ref, err := m.rows.Store(values[i])
			if err != nil {
				return root, err
			}
			batch[i].Value, batch[i].Large = ref[:], true
		}
	}
	return m.put(root, batch)
}

// sorted copies the batch's order, which the caller's rows keep.
func sorted(rows []btree.Entry) (names, values [][]byte) {
	order := slices.Clone(rows)
	slices.SortFunc(order, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	for _, e := range order {
		names, values = append(names, e.Key), append(values, e.Value)
	}
	return names, values
}

// batchBase is how many rows the tree holds before.
const batchBase = 50_000

// run inserts r.Size rows, fewer of long ones.
func (b inserts) run(r *harness.Run) (err error) {
	count := rowCount(r)
	store, err := openMemory(batchPageSize, 1<<18)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.close()) }()
	base := rows(r.Seed, min(batchBase, 10*count), 44, 104, 1)
	slices.SortFunc(base, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	root, err := store.put(btree.Root{}, base)
	if err != nil {
		return err
	}
	fresh := rows(r.Seed+1, count, shortest[r.Point], r.Point, 2)
	err = r.Time(count, func() (err error) {
		for batch := range slices.Chunk(fresh, rowsPerBatch) {
			if root, err = b.insert(store, root, batch); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.Count("row fill factor", store.rows.fill())
	right, err := store.holds(root, fresh)
	if err != nil {
		return err
	}
	return r.Verified(right, count)
}

// rowBytesMax keeps a run within one generation: rotating it would measure how fast the disk makes log segments.
const rowBytesMax = 32 << 20

// rowCount is how many rows a run inserts: a whole number of batches.
func rowCount(r *harness.Run) int {
	count := min(r.Size, rowBytesMax/r.Point)
	return max(count/rowsPerBatch, 1) * rowsPerBatch
}

// rows are entries in random order, of which key and value have together between least and most bytes.
func rows(seed uint64, count, least, most int, epoch keys.Epoch) []btree.Entry {
	random := rand.New(rand.NewPCG(seed, 2))
	const keyBytes = 1 + workload.TableKeyBytes // the key space and the longer of both shapes
	filler := make([]byte, most)
	for i := range filler {
		filler[i] = byte(random.Uint32())
	}
	out := make([]btree.Entry, count)
	for i := range out {
		key := appendUserKey(append(make([]byte, 0, keyBytes), byte(keys.SpaceUser)), random, seed, i)
		length := max(least+random.IntN(most-least+1)-len(keys.User(key)), 8)
		out[i] = btree.Entry{Key: key, Value: filler[:length], Trailer: keys.MakeTrailer(epoch, keys.KindSet)}
	}
	return out
}

// appendUserKey appends 16 random bytes, or a table key. Seeds that follow each other give table keys that are all different.
func appendUserKey(key []byte, random *rand.Rand, seed uint64, i int) []byte {
	if workload.TableKeys() {
		const half = 50_000_000
		return workload.TableKey(key, 2*workload.Permute(seed, uint64(i), half)+seed%2)
	}
	key = binary.BigEndian.AppendUint64(key, random.Uint64())
	return binary.BigEndian.AppendUint64(key, random.Uint64())
}
