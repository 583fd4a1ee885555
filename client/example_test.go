package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strconv"

	"github.com/epochkv/epochkv/client"
)

func ExampleClient() {
	c, err := client.Dial("127.0.0.1:7400")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	ctx := context.Background()
	if _, err := c.Put(ctx, []byte("greeting"), []byte("hello")); err != nil {
		log.Fatal(err)
	}
	v, err := c.Get(ctx, []byte("greeting"))
	if err != nil {
		log.Fatal(err)
	}
	if v.Found {
		fmt.Printf("%s, written at epoch %d\n", v.Data, v.Epoch)
	}
}

// A value that depends on the previous one: read, then write on the condition that there was no
// write in between.
func ExampleIf() {
	c, err := client.Dial("127.0.0.1:7400")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	ctx, key := context.Background(), []byte("counter")
	for {
		old, err := c.Get(ctx, key)
		if err != nil {
			log.Fatal(err)
		}
		unchanged := client.Absent(key)
		if old.Found {
			unchanged = client.WrittenAt(key, old.Epoch)
		}
		_, err = c.Put(ctx, key, append(old.Data, '+'), client.If(unchanged))
		if errors.Is(err, client.ErrPreconditionFailed) {
			continue // another write was faster
		}
		if err != nil {
			log.Fatal(err)
		}
		return
	}
}

func ExampleClient_Scan() {
	c, err := client.Dial("127.0.0.1:7400")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	for e, err := range c.Scan(context.Background(), client.Prefix([]byte("user/")), client.ScanOptions{Limit: 100}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s = %s\n", e.Key, e.Value)
	}
}

func ExampleClient_Pipeline() {
	c, err := client.Dial("127.0.0.1:7400")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = c.Close() }()

	p, err := c.Pipeline(context.Background(), client.PipelineOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for i := range 1_000_000 {
		if err := p.Put(fmt.Appendf(nil, "key-%07d", i), []byte("value"), nil); err != nil {
			log.Fatal(err)
		}
	}
	if err := p.Close(); err != nil { // the first error of all the puts
		log.Fatal(err)
	}
}

// Money moves between two accounts, or not at all. After a conflict the function runs again, with
// fresh reads.
func ExampleClient_Update() {
	ctx := context.Background()
	c, err := client.Dial("127.0.0.1:7400")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	err = c.Update(ctx, func(tx *client.Txn) error {
		from, err := tx.Get([]byte("account/1"))
		if err != nil {
			return err
		}
		balance, err := strconv.Atoi(string(from.Data))
		if err != nil || balance < 10 {
			return fmt.Errorf("account 1 has only %q", from.Data)
		}
		if _, err := tx.Invoke(client.Increment([]byte("account/2"), 10)); err != nil {
			return err
		}
		return tx.Put([]byte("account/1"), []byte(strconv.Itoa(balance-10)))
	})
	if err != nil {
		log.Fatal(err)
	}
}
