package peers

import (
	"bytes"
	"context"
	"fmt"
)

// mix is a workload of YCSB: how many of a hundred operations are what. Records are drawn with Zipf's law and the skew of
// YCSB, among all that were loaded or, for latest, from the newest backwards.
type mix struct {
	name                               string
	about                              string
	read, update, insert, scan, modify int
	latest                             bool
}

// The core workloads.
var (
	ycsbA = mix{name: "a", about: "half reads, half updates", read: 50, update: 50}
	ycsbB = mix{name: "b", about: "95 % reads, 5 % updates", read: 95, update: 5}
	ycsbC = mix{name: "c", about: "reads only", read: 100}
	ycsbD = mix{name: "d", about: "95 % reads of the newest, 5 % inserts", read: 95, insert: 5, latest: true}
	ycsbE = mix{name: "e", about: "95 % ranges of 1 to 100, 5 % inserts", scan: 95, insert: 5}
	ycsbF = mix{name: "f", about: "half reads, half read-modify-writes by compare-and-swap", read: 50, modify: 50}
)

// do does one operation of the mix.
func (m mix) do(ctx context.Context, c *caller) error {
	dice := c.random.IntN(100)
	for _, of := range []struct {
		share int
		do    func() error
	}{
		{m.read, func() error { _, err := c.read(ctx, m.draw(c)); return err }},
		{m.update, func() error { return c.write(ctx, m.draw(c), c.version) }},
		{m.insert, func() error { return c.insert(ctx) }},
		{m.scan, func() error { return c.scanFrom(ctx, m.draw(c), 1+c.random.IntN(rangeSize)) }},
		{m.modify, func() error { return c.modify(ctx, m.draw(c)) }},
	} {
		if dice -= of.share; dice < 0 {
			return of.do()
		}
	}
	return fmt.Errorf("workload %s has less than a hundred in a hundred", m.name)
}

// draw draws a record. Keys look random, so that the number of a record can be its rank.
func (m mix) draw(c *caller) int {
	rank := c.zipf.Next()
	if m.latest {
		return max(int(c.records.present.Load())-1-rank, 0)
	}
	return rank
}

// insert adds a record.
func (c *caller) insert(ctx context.Context) error {
	i, err := c.records.claim()
	if err != nil {
		return err
	}
	if err := c.store.insert(ctx, c.records.key(i), value(i, c.version)); err != nil {
		return err
	}
	c.records.acknowledge(i, c.version)
	c.committed(i)
	return nil
}

// scanFrom reads a range that begins at record i. Others insert meanwhile, so that only the first key and the order are sure.
func (c *caller) scanFrom(ctx context.Context, i, limit int) error {
	from := c.records.key(i)
	keys, values, err := c.store.scan(ctx, from, nil, limit)
	if err != nil {
		return err
	}
	if len(keys) == 0 || len(keys) > limit || !bytes.Equal(keys[0], from) {
		return fmt.Errorf("range of %d from record %d: %d keys", limit, i, len(keys))
	}
	for j, key := range keys {
		if j > 0 && bytes.Compare(keys[j-1], key) >= 0 {
			return fmt.Errorf("range from record %d: entry %d is out of order", i, j)
		}
		if _, err := check(c.records.number(key), values[j], generation(1)); err != nil {
			return err
		}
	}
	return nil
}

// modify reads record i and swaps it for its next version, again and again while others are faster.
func (c *caller) modify(ctx context.Context, i int) error {
	for {
		version, err := c.read(ctx, i)
		if err != nil {
			return err
		}
		swapped, err := c.store.swap(ctx, c.records.key(i), value(i, version), value(i, version+1))
		if err != nil {
			return err
		}
		if swapped {
			c.records.versions[i].Add(1)
			c.committed(i)
			return nil
		}
	}
}
