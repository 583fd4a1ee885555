package enginetest

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// snapshot reads everything, and returns after which commit each member's keys are; nil if something could not be read.
func (c *crowd) snapshot(x *session, open, reverse bool) []int64 {
	c.Helper()
	if !open {
		if _, err := x.OpenSnapshot(0); err != nil {
			c.Errorf("snapshot: %v", err)
			return nil
		}
		defer x.CloseSnapshot()
	}
	cursor, err := x.Scan(mvcc.ScanOptions{Reverse: reverse})
	if err != nil {
		c.Errorf("scan: %v", err)
		return nil
	}
	defer cursor.Close()
	got := map[string]string{}
	last := ""
	for cursor.Next() {
		key := string(cursor.Key())
		if last != "" && (key > last) == reverse || key == last {
			c.Errorf("key %.20q comes after %.20q", key, last)
		}
		last = key
		got[key] = string(cursor.Value())
	}
	if err := cursor.Err(); err != nil {
		if !c.bearable(err) {
			c.Errorf("scan at %d: %v", x.at, err)
		} else if c.faults && !c.mem.Crashed() {
			c.readDamaged(x)
		}
		return nil
	}
	serials, all := make([]int64, len(c.members)), 0
	for i, m := range c.members {
		serial, err := m.check(got)
		if err != nil {
			c.Errorf("round %d: snapshot at %d: %v", c.rounds, x.at, err)
			return nil
		}
		serials[i] = serial
		all += len(m.at(serial))
	}
	if all != len(got) {
		c.Errorf("round %d: snapshot at %d has %d keys, want %d", c.rounds, x.at, len(got), all)
	}
	return serials
}

// read reads a snapshot, at once and later.
func (c *crowd) read(rng *rand.Rand) {
	x, err := openSession(c.s)
	if err != nil {
		return
	}
	defer x.Close()
	least := make([]int64, len(c.members))
	for i, m := range c.members {
		least[i] = m.visible.Load()
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		c.Errorf("snapshot: %v", err)
		return
	}
	var before []int64
	for again := range 1 + rng.IntN(3) {
		serials := c.snapshot(x, true, rng.IntN(2) == 0)
		if serials == nil {
			c.readEach(x, before)
			continue
		}
		for i, m := range c.members {
			if serials[i] < least[i] || serials[i] > m.begun.Load() {
				c.Errorf("round %d: snapshot at %d: member %d is after commit %d, not from %d to %d", c.rounds, x.at, m.id, serials[i], least[i], m.begun.Load())
			}
			if before != nil && before[i] != serials[i] {
				c.Errorf("round %d: snapshot at %d, reading %d: member %d is after commit %d, and was after %d", c.rounds, x.at, again, m.id, serials[i], before[i])
			}
		}
		before = serials
		c.count("snapshot")
		c.readEach(x, before)
		time.Sleep(time.Duration(rng.Int64N(int64(30 * time.Millisecond))))
	}
}

// readEach reads each key alone, if it is known what it has.
func (c *crowd) readEach(x *session, serials []int64) {
	if serials == nil {
		return
	}
	for i, m := range c.members {
		want := m.at(serials[i])
		list := make([][]byte, len(m.keys))
		for j, k := range m.keys {
			list[j] = []byte(k)
		}
		err := x.ReadAll(context.Background(), list, func(j int, v mvcc.Value) error {
			if w := want[m.keys[j]]; v.Found != (w != "") || string(v.Data) != w {
				c.Errorf("round %d: snapshot at %d: %.20q of member %d has %.40q (%v), want %.40q", c.rounds, x.at, m.keys[j], m.id, v.Data, v.Found, w)
			}
			return nil
		})
		if err != nil && !c.bearable(err) {
			c.Errorf("read at %d: %v", x.at, err)
		}
	}
}

// readDamaged reads each key alone: what can be read is right.
func (c *crowd) readDamaged(x *session) {
	got, lost := map[string]string{}, map[string]bool{}
	for _, m := range c.members {
		for _, k := range m.keys {
			v, err := x.Read(nil, []byte(k))
			switch {
			case err != nil && !c.bearable(err):
				c.Errorf("read at %d: %v", x.at, err)
			case err != nil:
				lost[k] = true
			case v.Found:
				got[k] = string(v.Data)
			}
		}
	}
	for _, m := range c.members {
		if lost[m.keys[0]] || lost[m.keys[len(m.keys)-1]] {
			continue
		}
		serial, _ := m.serialOf(func(k string) (string, bool) { v, ok := got[k]; return v, ok })
		want := m.at(serial)
		for _, k := range m.keys {
			if v, is := got[k]; !lost[k] && (v != want[k] || is != (want[k] != "")) {
				c.Errorf("round %d: damaged, at %d: member %d after commit %d: %.20q has %.40q (%v), want %.40q", c.rounds, x.at, m.id, serial, k, v, is, want[k])
			}
		}
	}
	c.count("read of a damaged store")
}
