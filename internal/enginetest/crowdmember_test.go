package enginetest

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// A member owns some keys, among those of all others, and writes them in commits with consecutive serial numbers. What its keys have after a
// commit follows from the serial number alone, and the first key has that number: so a reader of any snapshot, or of what a crash
// left, knows what all of them must have.
type member struct {
	id   int
	kind memberKind
	keys []string // the first one has the serial number
	big  int      // largest value

	begun, visible, durable atomic.Int64 // serial numbers

	mu      sync.Mutex
	epochs  map[int64]keys.Epoch // of commits
	refused map[int64]bool       // commits that did not happen
}

type memberKind int

const (
	memberWrites memberKind = iota // batches and transactions
	memberLoads                    // bulk loads
	memberClears                   // its keys are neighbours: all are set, and half of them deleted as a range
)

// wholeEvery is how often a commit writes all keys of its member, whatever they had.
const wholeEvery = 8

func newMember(id int, kind memberKind, count, longest, big int) *member {
	m := &member{id: id, kind: kind, big: big, epochs: map[int64]keys.Epoch{}, refused: map[int64]bool{}}
	for i := range count {
		key := fmt.Sprintf("%03d-%02d", (i*37+id*11)%1000, id)
		if kind == memberClears {
			key = fmt.Sprintf("500-%02d-%03d", id, count-1-i) // the serial number has the largest
		} else if i%5 == 4 && longest > len(key) {
			key += strings.Repeat("k", longest-len(key))
		}
		m.keys = append(m.keys, key)
	}
	return m
}

func (m *member) hash(serial int64, key int) uint64 {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, m.id, " ", serial, " ", key)
	return h.Sum64()
}

// wrote reports whether a commit wrote a key, and its value; "" is a deletion.
func (m *member) wrote(serial int64, key int) (value string, wrote bool) {
	if m.kind == memberClears {
		if serial%2 == 0 {
			return "", key >= len(m.keys)/2
		}
		return m.value(serial, key), true
	}
	h := m.hash(serial, key)
	if m.kind == memberWrites && key > 0 {
		if serial%wholeEvery != 0 && h%3 != 0 {
			return "", false
		}
		if h>>8%5 == 0 {
			return "", true
		}
	}
	return m.value(serial, key), true
}

func (m *member) value(serial int64, key int) string {
	sizes := []int{0, 1, 20, 90, 119, 120, 470, 600, 1000, 2500, 9000, 70000}
	h := m.hash(serial, key)
	v := strconv.FormatInt(serial, 10) + ":" + strconv.FormatUint(h, 36)
	return v + strings.Repeat("v", min(m.big, sizes[h>>16%uint64(len(sizes))]))
}

// at is what the keys have after a commit.
func (m *member) at(serial int64) map[string]string {
	all := map[string]string{}
	for i, key := range m.keys {
		for s := serial; s > max(0, serial-wholeEvery); s-- {
			if v, wrote := m.wrote(s, i); wrote {
				if v != "" {
					all[key] = v
				}
				break
			}
		}
	}
	return all
}

// serialOf is the commit after which the keys have these values, as far as the values that tell it say.
func (m *member) serialOf(have func(key string) (string, bool)) (int64, error) {
	v, found := have(m.keys[0])
	if !found {
		return 0, nil
	}
	serial, err := strconv.ParseInt(v[:max(0, strings.IndexByte(v, ':'))], 10, 64)
	if _, rest := have(m.keys[len(m.keys)-1]); err == nil && m.kind == memberClears && !rest {
		serial++
	}
	return serial, err
}

// check compares the keys with what they have after some commit, and returns which one.
func (m *member) check(got map[string]string) (int64, error) {
	serial, err := m.serialOf(func(k string) (string, bool) { v, ok := got[k]; return v, ok })
	if err != nil {
		return 0, err
	}
	want := m.at(serial)
	for _, k := range m.keys {
		if v, is := got[k]; v != want[k] || is != (want[k] != "") {
			return serial, fmt.Errorf("member %d after commit %d: %.20q has %.40q (%d), want %.40q (%d)", m.id, serial, k, v, len(v), want[k], len(want[k]))
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refused[serial] {
		return serial, fmt.Errorf("member %d has commit %d, which was refused", m.id, serial)
	}
	return serial, nil
}

// next begins the next commit. After one whose outcome is not known, or that did not happen, all keys are written.
func (m *member) next(certain bool) int64 {
	serial := m.begun.Load() + 1
	if !certain && m.kind == memberWrites {
		serial += -serial & (wholeEvery - 1)
	}
	if m.kind == memberClears && serial%2 == 0 && !certain {
		serial++
	}
	m.begun.Store(serial)
	return serial
}

func (m *member) committed(serial int64, e keys.Epoch) {
	m.mu.Lock()
	m.epochs[serial] = e
	m.mu.Unlock()
}

func (m *member) refuse(serial int64) {
	m.mu.Lock()
	m.refused[serial] = true
	m.mu.Unlock()
}

// commit makes one commit, and waits as the durability asks.
func (m *member) commit(x *session, serial int64, d mvcc.Durability, transaction bool) (e keys.Epoch, err error) {
	switch {
	case m.kind == memberClears && serial%2 == 0:
		keys := m.keys[len(m.keys)/2:]
		out, err := x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(keys[len(keys)-1]), Upper: []byte(keys[0] + "x"), Durability: d})
		if err == nil && out.Count != len(keys) {
			err = fmt.Errorf("%d of %d keys were deleted", out.Count, len(keys))
		}
		return out.Epoch, err
	case transaction:
		return m.transaction(x, serial, d)
	}
	w := mvcc.Write{Durability: d}
	for i, key := range m.keys {
		if v, wrote := m.wrote(serial, i); wrote && v != "" {
			w.Set([]byte(key), []byte(v))
		} else if wrote {
			w.Delete([]byte(key))
		}
	}
	return x.Commit(context.Background(), &w)
}

func (m *member) transaction(x *session, serial int64, d mvcc.Durability) (keys.Epoch, error) {
	txn, err := x.Begin(mvcc.TxnOptions{Durability: d})
	if err != nil {
		return 0, err
	}
	defer txn.Rollback()
	for i, key := range m.keys {
		if v, wrote := m.wrote(serial, i); wrote && v != "" {
			err = errors.Join(err, txn.Set([]byte(key), []byte(v)))
		} else if wrote {
			err = errors.Join(err, txn.Delete([]byte(key)))
		}
	}
	if err == nil {
		_, err = txn.Get(nil, []byte(m.keys[0]))
	}
	if err != nil {
		return 0, err
	}
	return txn.Commit(context.Background())
}
