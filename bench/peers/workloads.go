package peers

import (
	"bytes"
	"context"
	"fmt"
)

// any draws one of the loaded records, all equally often.
func (c *caller) any() int { return c.random.IntN(len(c.order)) }

// read gets record i and checks what comes.
func (c *caller) read(ctx context.Context, i int) (version uint64, err error) {
	least := c.records.versions[i].Load()
	got, err := c.store.get(ctx, c.records.key(i))
	if err != nil {
		return 0, err
	}
	return c.look(i, got, least)
}

// look checks a value that was read.
func (c *caller) look(i int, got []byte, least uint64) (version uint64, err error) {
	if c.kind.hollow() {
		return 0, wantBytes(got)
	}
	return check(i, got, least)
}

func wantBytes(got []byte) error {
	if len(got) != valueBytes {
		return fmt.Errorf("the echo has %d bytes, want %d", len(got), valueBytes)
	}
	return nil
}

// own draws one of the first n records that belong to the caller: no other caller writes them, so that this caller knows what they hold.
func (c *caller) own(n int) int { return c.random.IntN(n/c.of)*c.of + c.id }

// write puts record i at a version.
func (c *caller) write(ctx context.Context, i int, version uint64) error {
	if err := c.store.put(ctx, c.records.key(i), value(i, version)); err != nil {
		return err
	}
	c.records.versions[i].Store(version)
	c.committed(i)
	return nil
}

// committed remembers a commit that was acknowledged, and the record that it wrote.
func (c *caller) committed(i int) {
	c.commits++
	c.wrote = append(c.wrote, i)
}

func getAny(ctx context.Context, c *caller) error {
	_, err := c.read(ctx, c.any())
	return err
}

func putOwn(ctx context.Context, c *caller) error {
	i := c.own(len(c.order))
	return c.write(ctx, i, c.records.versions[i].Load()+1)
}

// putBatch puts one of the caller's blocks of records, which are no neighbours in the order of keys.
func putBatch(ctx context.Context, c *caller) error {
	size := min(batchSize, len(c.order)/c.of)
	from, version := c.own(len(c.order)/size)*size, c.version+uint64(c.commits)+1
	keys, values := c.batch(from, from+size, version)
	if err := c.store.putAll(ctx, keys, values); err != nil {
		return err
	}
	c.commits++
	for i := from; i < from+size; i++ {
		c.records.versions[i].Store(version)
		c.wrote = append(c.wrote, i)
	}
	return nil
}

// rangeSize is how many records a range has.
const rangeSize = 100

// scanRange reads a range between two keys and compares its keys with those that must be there.
func scanRange(ctx context.Context, c *caller) error {
	size := min(rangeSize, len(c.order))
	from := c.random.IntN(len(c.order) - size + 1)
	var to []byte
	if from+size < len(c.order) {
		to = c.records.key(int(c.order[from+size]))
	}
	keys, values, err := c.store.scan(ctx, c.records.key(int(c.order[from])), to, size)
	if err != nil {
		return err
	}
	if len(keys) != size {
		return fmt.Errorf("range of %d: got %d", size, len(keys))
	}
	if c.kind.hollow() {
		return nil
	}
	for j, key := range keys {
		i := int(c.order[from+j])
		if !bytes.Equal(key, c.records.key(i)) {
			return fmt.Errorf("range: entry %d is %x, want record %d", j, key, i)
		}
		if _, err := check(i, values[j], generation(1)); err != nil {
			return err
		}
	}
	return nil
}

// counters is how many records the swaps work on: so few that all of them can be read back.
const counters = 2048

// swapOwn swaps one of the caller's records for its next version: one condition, one put, no conflict.
func swapOwn(ctx context.Context, c *caller) error {
	i := c.own(min(counters, len(c.order)))
	version := c.records.versions[i].Load()
	swapped, err := c.store.swap(ctx, c.records.key(i), value(i, version), value(i, version+1))
	if err != nil {
		return err
	}
	if !swapped {
		return fmt.Errorf("record %d: version %x is not there, although no other goroutine writes it", i, version)
	}
	c.records.versions[i].Add(1)
	c.committed(i)
	return nil
}
