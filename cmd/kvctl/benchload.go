package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/client"
)

// The workloads of kvctl bench.
const (
	benchPut   = "put"
	benchGet   = "get"
	benchBatch = "batch"
	benchScan  = "scan"
	benchTxn   = "txn"
	benchMixed = "mixed"
)

var benchWorkloads = []string{benchPut, benchGet, benchBatch, benchScan, benchTxn, benchMixed}

// errLost means that a key which the benchmark had written was not there.
var errLost = errors.New("bench: a key that was written is missing")

// request is what the caller sends again and again. It returns how many keys the request read or wrote.
func (c *caller) request() func(context.Context) (int, error) {
	return map[string]func(context.Context) (int, error){
		benchPut: c.put, benchGet: c.get, benchBatch: c.writeBatch, benchScan: c.readRange, benchTxn: c.transact, benchMixed: c.mix,
	}[c.workload]
}

func (c *caller) anyKey() []byte { return c.key(c.random.IntN(c.keys)) }

// durability is the option of the caller's writes.
func (c *caller) durability() client.WriteOption {
	if c.async {
		return client.Async()
	}
	return client.Sync()
}

func (c *caller) put(ctx context.Context) (int, error) {
	_, err := c.client.Put(ctx, c.anyKey(), c.value, c.durability())
	return 1, err
}

func (c *caller) get(ctx context.Context) (int, error) {
	v, err := c.client.Get(ctx, c.anyKey())
	if err == nil && !v.Found {
		err = errLost
	}
	return 1, err
}

func (c *caller) mix(ctx context.Context) (int, error) {
	if c.random.IntN(100) < c.readPercent {
		return c.get(ctx)
	}
	return c.put(ctx)
}

// writeBatch writes neighbours from a random key on, around the end: a batch takes no key twice.
func (c *caller) writeBatch(ctx context.Context) (int, error) {
	var batch client.Batch
	first := c.random.IntN(c.keys)
	for i := range c.batch {
		batch.Put(c.key((first+i)%c.keys), c.value)
	}
	_, err := c.client.Write(ctx, &batch, c.durability())
	return c.batch, err
}

func (c *caller) readRange(ctx context.Context) (int, error) {
	first := c.random.IntN(c.keys)
	want := min(c.scan, c.keys-first)
	end := c.key(c.keys) // after the last key
	count := 0
	for _, err := range c.client.Scan(ctx, client.Between(c.key(first), end), client.ScanOptions{Limit: uint64(c.scan)}) {
		if err != nil {
			return count, err
		}
		count++
	}
	if count != want {
		return count, fmt.Errorf("%w: a scan found %d of %d entries", errLost, count, want)
	}
	return count, nil
}

// transact reads one key and writes another.
func (c *caller) transact(ctx context.Context) (int, error) {
	from, to := c.anyKey(), c.anyKey()
	err := c.client.Update(ctx, func(tx *client.Txn) error {
		v, err := tx.Get(from)
		if err != nil {
			return err
		}
		if !v.Found {
			return errLost
		}
		return tx.Put(to, v.Data)
	}, client.CommitWith(c.durability()))
	return 2, err
}
