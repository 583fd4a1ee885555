// Command sqliteview keeps a table in a SQLite database exactly in step with the keys of a prefix:
//
//	sqliteview -endpoint 127.0.0.1:7400 -prefix user/ -db users.sqlite
//	sqlite3 users.sqlite "select count(*) from entries where key >= 'user/'"
//
// It reads the keys first and then follows their changes, as one watch. Each transaction of the database writes the rows and
// the resume token together. Either side may be killed at any moment: the next start continues with the token that is in the
// database, so no change is missed, and none is applied twice. The table never shows a half of a commit; "position" says which
// epoch it shows, and "complete" is 0 only while the first read of all keys is under way.
//
// The driver is modernc.org/sqlite, which is SQLite translated to Go. It needs no C compiler, neither here nor for a build for
// another platform. A driver through cgo is faster per row, but a view waits for the server and for its own disk, not for the
// driver.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func main() {
	endpoint := flag.String("endpoint", "127.0.0.1:7400", "the server's `HOST:PORT`")
	prefix := flag.String("prefix", "", "keep the keys that begin with this; all keys, if it is empty")
	file := flag.String("db", "view.sqlite", "the database `FILE`; it is created if it does not exist")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *endpoint, []byte(*prefix), *file); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "sqliteview:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, endpoint string, prefix []byte, file string) error {
	c, err := client.Dial(endpoint)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	v, err := openView(ctx, file, prefix)
	if err != nil {
		return err
	}
	defer func() { _ = v.close() }()
	for {
		err := follow(ctx, c, v)
		if !beginAnew(err) || ctx.Err() != nil {
			return err
		}
		if err := v.forget(ctx); err != nil {
			return err
		}
	}
}

// beginAnew reports whether an error means that the server cannot continue the view: it was away for longer than the server
// keeps changes, or the server has another history. All keys are read again then.
func beginAnew(err error) bool {
	var e *client.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Reason {
	case kvpb.ErrorReason_ERROR_REASON_HISTORY_GONE, kvpb.ErrorReason_ERROR_REASON_LINEAGE_CHANGED, kvpb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE:
		return true
	}
	return false
}

// follow applies what the watch delivers, until an error. The watch itself continues after restarts of the server.
func follow(ctx context.Context, c *client.Client, v *view) error {
	token, err := v.token(ctx)
	if err != nil {
		return err
	}
	options := client.WatchOptions{Token: token, Snapshot: true, Difference: true, Progress: time.Second}
	for u, err := range c.Watch(ctx, []client.Range{client.Prefix(v.prefix)}, options) {
		if err != nil {
			return err
		}
		if err := v.apply(ctx, c, &u); err != nil {
			return err
		}
	}
	return ctx.Err()
}
