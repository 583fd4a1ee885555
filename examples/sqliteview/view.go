package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"

	_ "modernc.org/sqlite" // the driver

	"github.com/epochkv/epochkv/client"
)

// view is the table, and how far it has come. Invariant: in every state that a reader of the database can see, and after every
// crash, the rows are what the token stands for.
type view struct {
	db     *sql.DB
	prefix []byte
	tx     *sql.Tx // open while a commit has come in part; nil otherwise
}

const schema = `
create table if not exists entries (key blob primary key, value blob not null, epoch integer not null) without rowid;
create table if not exists position (one integer primary key check (one = 1), prefix blob not null, token blob, epoch integer not null, complete integer not null);
`

// openView opens the database. A crash of the operating system may take back the last transactions (synchronous=normal): they
// are rows and token alike, and come again.
func openView(ctx context.Context, file string, prefix []byte) (*view, error) {
	db, err := sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode(wal)&_pragma=synchronous(normal)&_pragma=busy_timeout(10000)")
	if err != nil {
		return nil, err
	}
	v := &view{db: db, prefix: append([]byte{}, prefix...)}
	if err := v.prepare(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return v, nil
}

func (v *view) prepare(ctx context.Context) error {
	if _, err := v.db.ExecContext(ctx, schema); err != nil {
		return err
	}
	if _, err := v.db.ExecContext(ctx, "insert into position values (1, ?, null, 0, 0) on conflict do nothing", v.prefix); err != nil {
		return err
	}
	var prefix []byte
	if err := v.db.QueryRowContext(ctx, "select prefix from position").Scan(&prefix); err != nil {
		return err
	}
	if !bytes.Equal(prefix, v.prefix) {
		return fmt.Errorf("the database is a view of prefix %q, not of %q; choose another file", prefix, v.prefix)
	}
	return nil
}

func (v *view) close() error {
	if v.tx != nil {
		_ = v.tx.Rollback()
	}
	return v.db.Close()
}

// token is where to continue; nil if all keys have to be read.
func (v *view) token(ctx context.Context) (token []byte, err error) {
	err = v.db.QueryRowContext(ctx, "select token from position").Scan(&token)
	return token, err
}

// forget lets the next watch begin with all keys. The rows stay until the first of them have come.
func (v *view) forget(ctx context.Context) error {
	if v.tx != nil {
		if err := v.tx.Rollback(); err != nil {
			return err
		}
		v.tx = nil
	}
	_, err := v.db.ExecContext(ctx, "update position set token = null")
	return err
}

// apply applies an update. It ends the transaction unless the update ends within a commit, whose rest comes next.
func (v *view) apply(ctx context.Context, c *client.Client, u *client.Update) (err error) {
	if v.tx == nil {
		if v.tx, err = v.db.BeginTx(ctx, nil); err != nil {
			return err
		}
	}
	defer func() {
		if err != nil && v.tx != nil {
			_ = v.tx.Rollback()
			v.tx = nil
		}
	}()
	if err := v.change(ctx, c, u); err != nil {
		return err
	}
	if n := len(u.Commits); n > 0 && !u.Commits[n-1].End {
		return nil
	}
	if _, err := v.tx.ExecContext(ctx, "update position set token = ?, epoch = ?, complete = ?", u.Token, int64(u.Epoch), !u.Partial); err != nil {
		return err
	}
	err = v.tx.Commit()
	v.tx = nil
	return err
}

// change changes the rows.
func (v *view) change(ctx context.Context, c *client.Client, u *client.Update) error {
	if u.Begin {
		if _, err := v.tx.ExecContext(ctx, "delete from entries"); err != nil {
			return err
		}
	}
	for i := range u.Snapshot {
		if err := v.set(ctx, &u.Snapshot[i]); err != nil {
			return err
		}
	}
	if err := v.events(ctx, c, u.Epoch, u.Difference); err != nil {
		return err
	}
	for i := range u.Commits {
		if err := v.events(ctx, c, u.Commits[i].Epoch, u.Commits[i].Events); err != nil {
			return err
		}
	}
	return nil
}

func (v *view) events(ctx context.Context, c *client.Client, epoch client.Epoch, list []client.Event) (err error) {
	for i := range list {
		switch e := &list[i]; e.Kind {
		case client.EventSet:
			err = v.set(ctx, &client.Entry{Key: e.Key, Value: e.Value, Epoch: epoch})
		case client.EventDelete:
			_, err = v.tx.ExecContext(ctx, "delete from entries where key = ?", e.Key)
		case client.EventLoaded:
			err = v.load(ctx, c, epoch)
		default:
			err = fmt.Errorf("event %v is not known to this program", e.Kind)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (v *view) set(ctx context.Context, e *client.Entry) error {
	value := e.Value
	if value == nil {
		value = []byte{} // nil is NULL to the database
	}
	_, err := v.tx.ExecContext(ctx, "insert into entries values (?, ?, ?) on conflict (key) do update set value = excluded.value, epoch = excluded.epoch",
		e.Key, value, int64(e.Epoch))
	return err
}

// load reads the keys after a bulk load, as its commit left them.
func (v *view) load(ctx context.Context, c *client.Client, epoch client.Epoch) error {
	if _, err := v.tx.ExecContext(ctx, "delete from entries"); err != nil {
		return err
	}
	for e, err := range c.Scan(ctx, client.Prefix(v.prefix), client.ScanOptions{At: epoch}) {
		if err != nil {
			return err
		}
		if err := v.set(ctx, &e); err != nil {
			return err
		}
	}
	return nil
}
