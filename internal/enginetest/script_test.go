package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestScripts runs testdata/scripts/*. A script is comments, paragraphs of commands, and what each paragraph prints; `-rewrite` writes the output.
//
//	put K V [sync] | del K [sync] | get K [reader=R] | scan [reader=R]     a write without sync is ASYNC
//	begin R | end R       open and close a reader, which keeps its snapshot
//	rotate                fill the memtable with keys that scan does not show, until the log rotates
//	checkpoint            merge everything into the tree
//	vacuum                make checkpoints until the tree has no dead versions
//	reopen                close and open
//	crash [all]           lose what is not on the device, or nothing that was written; open
//	damage leaves|superblock   close; change one bit of each leaf with client keys, or of the newest superblock; open
//	verify                check the newest durable state
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/scripts", func(t *testing.T, file string) {
		r := &script{T: t, fs: vfs.NewMem(), readers: map[string]*session{}}
		r.open()
		defer r.close()
		datadriven.RunTest(t, file, func(_ *testing.T, d *datadriven.TestData) string { return r.run(d) })
	})
}

// script is a store under the commands of a script.
type script struct {
	*testing.T
	fs      *vfs.Mem
	store   *mvcc.Store
	readers map[string]*session
}

// fillerPrefix is that of the keys that rotate puts.
const fillerPrefix = "~filler"

func (r *script) options() mvcc.Options {
	o := tiny(r.fs)
	o.SyncInterval = time.Hour // an ASYNC commit is lost with a crash
	o.Storage.PageSize = 512
	o.Storage.CheckpointBytes = 64 << 20 // checkpoints are commands
	return o
}

func (r *script) open() {
	s, err := mvcc.Open(r.options())
	if err != nil {
		r.Fatal(err)
	}
	r.store = s
}

func (r *script) close() {
	r.endAll()
	if err := r.store.Close(); err != nil {
		r.Fatal(err)
	}
}

func (r *script) endAll() {
	for name := range r.readers {
		r.end(name)
	}
}

func (r *script) end(reader string) {
	r.readers[reader].Close()
	delete(r.readers, reader)
}

// run executes a paragraph: the command in its first line, and those in the lines after it.
func (r *script) run(d *datadriven.TestData) string {
	first := []string{d.Cmd}
	for _, a := range d.CmdArgs {
		first = append(first, a.String())
	}
	lines := append([]string{strings.Join(first, " ")}, strings.Split(d.Input, "\n")...)
	var out []string
	for _, line := range lines {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		result, err := r.command(words)
		if err != nil {
			result = describe(err)
		}
		if result != "" {
			out = append(out, result)
		}
	}
	if len(out) == 0 {
		return "ok\n"
	}
	return strings.Join(out, "\n") + "\n"
}

// describe names an error without the file and the offset.
func describe(err error) string {
	if asDamage(err) {
		return "damage"
	}
	return err.Error()
}

func (r *script) command(w []string) (string, error) {
	switch w[0] {
	case "put", "del":
		return "", r.write(w)
	case "get", "scan":
		return r.read(w)
	case "begin":
		x := mustSession(r.T, r.store)
		r.readers[w[1]] = x
		_, err := x.OpenSnapshot(0)
		return "", err
	case "end":
		r.end(w[1])
		return "", nil
	case "rotate":
		return "", r.rotate()
	case "checkpoint":
		return "", r.store.Checkpoint(context.Background())
	case "vacuum":
		return r.vacuum()
	case "reopen":
		r.close()
		r.open()
		return "", nil
	case "crash":
		r.crash(w)
		return "", nil
	case "damage":
		return r.damage(w[1])
	case "verify":
		return r.verify()
	}
	r.Fatalf("unknown command %q", w)
	return "", nil
}

func (r *script) write(w []string) error {
	x := mustSession(r.T, r.store)
	defer x.Close()
	write := mvcc.Write{Durability: mvcc.DurabilityAsync}
	if w[len(w)-1] == "sync" {
		write.Durability = mvcc.DurabilitySync
	}
	if w[0] == "put" {
		write.Set([]byte(w[1]), []byte(w[2]))
	} else {
		write.Delete([]byte(w[1]))
	}
	_, err := commitAndWait(x, &write)
	return err
}

// reader is the named reader, or a new one.
func (r *script) reader(w []string) (x *session, end func(), err error) {
	if name, ok := strings.CutPrefix(w[len(w)-1], "reader="); ok {
		return r.readers[name], func() {}, nil
	}
	x = mustSession(r.T, r.store)
	_, err = x.OpenSnapshot(0)
	return x, x.Close, err
}

func (r *script) read(w []string) (string, error) {
	x, end, err := r.reader(w)
	defer end()
	if err != nil {
		return "", err
	}
	if w[0] == "get" {
		v, err := x.Read(nil, []byte(w[1]))
		if err == nil && !v.Found {
			return "-", nil
		}
		return string(v.Data), err
	}
	c, err := x.Scan(mvcc.ScanOptions{Upper: []byte(fillerPrefix)})
	if err != nil {
		return "", err
	}
	defer c.Close()
	var out []string
	for c.Next() {
		out = append(out, fmt.Sprintf("%s=%s", c.Key(), c.Value()))
	}
	return fmt.Sprint(out), c.Err()
}

func (r *script) rotate() error {
	x := mustSession(r.T, r.store)
	defer x.Close()
	before := r.store.Stats().Storage.Rotations
	for i := 0; r.store.Stats().Storage.Rotations == before; i++ {
		if _, err := put(x, fmt.Sprintf("%s%03d", fillerPrefix, i), strings.Repeat("x", 4000), mvcc.DurabilityAsync); err != nil {
			return err
		}
	}
	return nil
}

func (r *script) vacuum() (string, error) {
	for range 20 {
		if err := r.store.Checkpoint(context.Background()); err != nil {
			return "", err
		}
		if r.store.Stats().Storage.Tree.DeadVersionRatio == 0 {
			return "", nil
		}
	}
	return "dead versions remain", nil
}

func (r *script) crash(w []string) {
	survival := vfs.SurviveNone
	if w[len(w)-1] == "all" {
		survival = vfs.SurviveAll
	}
	left := r.fs.Crash(1, survival)
	r.endAll()
	if err := r.store.Close(); !errors.Is(err, vfs.ErrCrashed) {
		r.Fatalf("close after a crash: %v", err)
	}
	r.fs = left
	r.open()
}

func (r *script) damage(what string) (string, error) {
	r.close()
	defer r.open()
	switch what {
	case "leaves":
		if len(damageUserLeaves(r.T, r.fs, 512)) == 0 {
			return "", errors.New("no leaf to damage")
		}
	case "superblock":
		flip(r.T, r.fs, newestSuperblock(r.T, r.fs, 512)[0])
	default:
		r.Fatalf("unknown damage %q", what)
	}
	return "", nil
}

// verify prints what is damaged, or how many versions of the tree are superseded.
func (r *script) verify() (string, error) {
	report, err := r.store.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		return "", err
	}
	if report.OK() {
		return fmt.Sprintf("intact, %d superseded versions", report.Versions-report.Keys), nil
	}
	kinds := map[inspect.DamageKind]bool{}
	var out []string
	for _, d := range report.Damages {
		if !kinds[d.Kind] {
			kinds[d.Kind] = true
			out = append(out, "damaged: "+string(d.Kind))
		}
	}
	return strings.Join(out, "\n"), nil
}
