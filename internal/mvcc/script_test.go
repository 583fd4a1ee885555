package mvcc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts print into testdata/scripts")

// TestScripts runs testdata/scripts/*: paragraphs of comments, commands, a line of dashes, and what they print.
//
//	put K V | del K | get K [at=E] | scan [LOWER UPPER] [reverse] | delrange LOWER UPPER [limit=N]
//	begin T [snapshot|serializable] [readonly]      T get K | T put K V | T del K | T scan [L U] [reverse]
//	T delrange L U | T savepoint | T rollbackto N | T commit | T rollback
//	restart | collect
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/scripts/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d scripts, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) { runScript(t, file) })
	}
}

func runScript(t *testing.T, file string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	r := &scriptRun{t: t, fs: vfs.NewMem(), txns: map[string]*Txn{}}
	r.open()
	var out strings.Builder
	for i, block := range strings.Split(strings.TrimSpace(string(text)), "\n\n") {
		commands, want, _ := strings.Cut(block+"\n", "----\n")
		got := r.run(commands)
		if !*rewrite && got != want {
			t.Errorf("%s, paragraph %d:\n%s---- got\n%s---- want\n%s", file, i+1, commands, got, want)
		}
		if i > 0 {
			out.WriteString("\n")
		}
		out.WriteString(commands + "----\n" + got)
	}
	r.close()
	if *rewrite {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

type scriptRun struct {
	t     *testing.T
	fs    *vfs.Mem
	store *Store
	plain *Session
	txns  map[string]*Txn
}

func (r *scriptRun) open() {
	o := tiny(r.fs)
	o.GCInterval = time.Hour // only collect moves the GC watermarks, so that scripts can be repeated
	r.store = mustOpen(r.t, o)
	r.plain = mustSession(r.t, r.store)
}

func (r *scriptRun) close() {
	r.plain.Close()
	for _, x := range r.txns {
		x.session.Close()
	}
	clear(r.txns)
	mustClose(r.t, r.store)
}

func (r *scriptRun) run(commands string) string {
	var out strings.Builder
	for line := range strings.Lines(commands) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		result, err := r.command(words)
		if err != nil {
			result = r.describe(err)
		}
		for l := range strings.Lines(result) {
			out.WriteString(strings.TrimRight(l, "\n") + "\n")
		}
	}
	return out.String()
}

func (r *scriptRun) describe(err error) string {
	conflict, gone := new(ConflictError), new(SnapshotGoneError)
	switch {
	case errors.As(err, &conflict):
		return fmt.Sprintf("conflict on %s", conflict.Key)
	case errors.As(err, &gone):
		return fmt.Sprintf("epoch %d is gone", gone.Epoch)
	}
	return err.Error()
}

func (r *scriptRun) command(w []string) (string, error) {
	if x, ok := r.txns[w[0]]; ok {
		return r.inTxn(w[0], x, w[1:])
	}
	switch w[0] {
	case "put", "del":
		var write Write
		if w[0] == "put" {
			write.Set([]byte(w[1]), []byte(w[2]))
		} else {
			write.Delete([]byte(w[1]))
		}
		e, err := commitAndWait(r.plain, &write)
		return fmt.Sprintf("epoch %d", e), err
	case "get":
		v, err := r.plain.Get(nil, []byte(w[1]), epochOption(w))
		return describeValue(v), err
	case "scan":
		if _, err := r.plain.OpenSnapshot(epochOption(w)); err != nil {
			return "", err
		}
		defer r.plain.CloseSnapshot()
		c, err := r.plain.Scan(scanWords(w[1:]))
		if err != nil {
			return "", err
		}
		return walk(c)
	case "delrange":
		o := RangeDelete{Lower: []byte(w[1]), Upper: []byte(w[2])}
		o.Limit = int(option(w, "limit"))
		out, err := r.plain.DeleteRange(context.Background(), o)
		if err == nil {
			err = r.store.Wait(context.Background(), out.Epoch, DurabilitySync)
		}
		return fmt.Sprintf("%d deleted, epoch %d, more %v", out.Count, out.Epoch, out.More), err
	case "begin":
		o := TxnOptions{At: epochOption(w)}
		for _, f := range w[2:] {
			switch f {
			case "snapshot":
				o.Isolation = IsolationSnapshot
			case "readonly":
				o.ReadOnly = true
			}
		}
		session := mustSession(r.t, r.store)
		txn, err := session.Begin(o)
		if err != nil {
			session.Close()
			return "", err
		}
		r.txns[w[1]] = txn
		return "", nil
	case "restart":
		r.close()
		r.open()
		return fmt.Sprintf("epoch %d", r.store.Visible()), nil
	case "collect":
		return fmt.Sprint(r.collect()), nil
	}
	r.t.Fatalf("unknown command %q", w)
	return "", nil
}

// collect moves the GC watermarks, and returns the epochs that are needed: those of the transactions, and the newest. The store's
// own readers (the expirer, the timeline) hold one for a moment, and are waited for.
func (r *scriptRun) collect() []keys.Epoch {
	c, deadline := r.store.collector, time.Now().Add(10*time.Second)
	for {
		c.collect(nil, true)
		foreign := slices.ContainsFunc(c.live[:len(c.live)-1], func(e keys.Epoch) bool {
			for _, x := range r.txns {
				if x.At() == e {
					return false
				}
			}
			return true
		})
		if !foreign || time.Now().After(deadline) {
			return c.live
		}
		time.Sleep(time.Millisecond)
	}
}

func (r *scriptRun) inTxn(name string, x *Txn, w []string) (string, error) {
	switch w[0] {
	case "get":
		v, err := x.Get(nil, []byte(w[1]))
		return describeValue(v), err
	case "put":
		return "", x.Set([]byte(w[1]), []byte(w[2]))
	case "del":
		return "", x.Delete([]byte(w[1]))
	case "delrange":
		n, err := x.DeleteRange(context.Background(), []byte(w[1]), []byte(w[2]))
		return fmt.Sprintf("%d deleted", n), err
	case "scan":
		c, err := x.Scan(scanWords(w[1:]))
		if err != nil {
			return "", err
		}
		return walk(c)
	case "savepoint":
		n, err := x.Savepoint()
		return fmt.Sprintf("savepoint %d", n), err
	case "rollbackto":
		n, _ := strconv.Atoi(w[1])
		return "", x.RollbackTo(n)
	case "rollback":
		x.Rollback()
		delete(r.txns, name)
		x.session.Close()
		return "rolled back", nil
	case "commit":
		e, err := x.Commit(context.Background())
		if err == nil {
			err = r.store.Wait(context.Background(), e, DurabilitySync)
		}
		result := fmt.Sprintf("%s committed", name)
		if err != nil {
			result, err = name+": "+r.describe(err), nil
		}
		delete(r.txns, name)
		x.session.Close()
		return result, err
	}
	r.t.Fatalf("unknown command %q", w)
	return "", nil
}

func describeValue(v Value) string {
	if !v.Found {
		return "-"
	}
	return fmt.Sprintf("%s @%d", v.Data, v.Epoch)
}

type walker interface {
	Next() bool
	Key() []byte
	Value() []byte
	Epoch() keys.Epoch
	Err() error
	Close()
}

func walk(c walker) (string, error) {
	defer c.Close()
	var out []string
	for c.Next() {
		out = append(out, fmt.Sprintf("%s=%s@%d", c.Key(), c.Value(), c.Epoch()))
	}
	if len(out) == 0 {
		out = []string{"nothing"}
	}
	return strings.Join(out, " "), c.Err()
}

func scanWords(w []string) (o ScanOptions) {
	var plain []string
	for _, f := range w {
		switch {
		case f == "reverse":
			o.Reverse = true
		case !strings.Contains(f, "="):
			plain = append(plain, f)
		}
	}
	if len(plain) == 2 {
		o.Lower, o.Upper = []byte(plain[0]), []byte(plain[1])
	}
	return o
}

func option(w []string, name string) uint64 {
	for _, f := range w {
		if v, ok := strings.CutPrefix(f, name+"="); ok {
			n, _ := strconv.ParseUint(v, 10, 64)
			return n
		}
	}
	return 0
}

func epochOption(w []string) keys.Epoch { return keys.Epoch(option(w, "at")) }
