package enginetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// forgetful runs a workload over a file system on which the nth sync of the named files fails and
// gives up what was dirty, and returns the file system as the process leaves it. It reports whether
// the fault was met.
func forgetful(t *testing.T, mem *vfs.Mem, name string, nth int, work func(s *mvcc.Store)) bool {
	t.Helper()
	faulty := vfs.NewFaulty(mem)
	s, err := mvcc.Open(tiny(faulty))
	if err != nil {
		t.Fatal(err)
	}
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: name, Nth: nth, Fault: vfs.DiscardDirty})
	work(s)
	if err := s.Close(); err != nil && !errors.Is(err, mvcc.ErrFailed) && !errors.Is(err, storage.ErrFailed) {
		t.Fatal(err)
	}
	return rule.Fired() > 0
}

// content is what a store shows of keys 0 to n-1.
func content(t *testing.T, s *mvcc.Store, n int) map[string]string {
	t.Helper()
	shown := map[string]string{}
	for i := range n {
		key := fmt.Sprintf("key-%03d", i)
		if value := get(t, s, key, 0); value != "-" {
			shown[key] = value
		}
	}
	return shown
}

// TestWhatARestartAfterAFailedSyncShowsSurvivesACrash: a sync fails, of a commit, a checkpoint or a bulk load, the process starts
// anew on the same kernel, and then the machine crashes. Everything that the second process showed or acknowledged must be there.
func TestWhatARestartAfterAFailedSyncShowsSurvivesACrash(t *testing.T) {
	testseed.SkipUnderRace(t)
	const puts = 20
	rng := rand.New(rand.NewPCG(crashTestSeed(t), 1))
	for _, name := range []string{"*.log", "data.ekv"} {
		for nth, loads := 1, false; ; nth++ {
			mem := vfs.NewMem()
			met := forgetful(t, mem, name, nth, func(s *mvcc.Store) {
				x := mustSession(t, s)
				defer x.Close()
				for i := range puts {
					if _, err := put(x, fmt.Sprintf("key-%03d", i%7), fmt.Sprint("first ", i), mvcc.DurabilitySync); err != nil {
						return
					}
					switch {
					case i%6 != 5:
					case loads:
						if _, err := load(s, map[string]string{"key-001": fmt.Sprint("loaded ", i), "key-008": fmt.Sprint("loaded ", i)}); err != nil {
							return
						}
					default:
						if s.Checkpoint(t.Context()) != nil {
							return
						}
					}
				}
			})
			if !met && nth < 3 {
				t.Fatalf("%s: %d syncs", name, nth-1)
			}
			if !met && !loads {
				nth, loads = 0, true
				continue
			}
			if !met {
				break
			}
			for at := int64(0); ; at += 1 + rng.Int64N(18) {
				if !crashedLater(t, mem.Crash(0, vfs.SurviveProcess), fmt.Sprintf("%s sync %d", name, nth), at) {
					break
				}
			}
		}
	}
}

// crashedLater opens the store as a new process does, looks at everything, writes on, and loses the
// machine at the given operation. It reports whether the crash came before the end.
func crashedLater(t *testing.T, mem *vfs.Mem, what string, at int64) bool {
	t.Helper()
	s, err := mvcc.Open(tiny(mem))
	if err != nil {
		t.Fatalf("%s: restart: %v", what, err)
	}
	acked := content(t, s, 10)
	if at > 0 {
		mem.CrashAt(mem.Mutations() + at)
	}
	x := mustSession(t, s)
	unknown := ""
	for i := range 12 {
		key, value := fmt.Sprintf("key-%03d", i%7), fmt.Sprint("second ", i)
		if _, err := put(x, key, value, mvcc.DurabilitySync); err != nil {
			unknown = key
			break
		}
		acked[key] = value
		if i%5 == 4 {
			_ = s.Checkpoint(t.Context())
		}
	}
	x.Close()
	crashed := mem.Crashed()
	disk := mem.Crash(1, vfs.SurviveNone)
	_ = s.Close()
	s, err = mvcc.Open(tiny(disk))
	if err != nil {
		t.Fatalf("%s, crash %d: after the crash: %v", what, at, err)
	}
	for key, want := range acked {
		if got := get(t, s, key, 0); key != unknown && got != want {
			t.Fatalf("%s, crash %d: %s is %q, and was read as %q before", what, at, key, got, want)
		}
	}
	mustClose(t, s)
	return at == 0 || crashed
}

// TestANameWhoseSyncFailedIsMadeAnew: a sync of a directory fails in the first start, and what was made before it is not on the device, though the kernel
// shows it and later syncs succeed. The process starts again, and then the machine crashes.
func TestANameWhoseSyncFailedIsMadeAnew(t *testing.T) {
	syncs := 0
	for nth := 1; ; nth++ {
		mem := vfs.NewMem()
		faulty := vfs.NewFaulty(mem)
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncDir, Nth: nth, Fault: vfs.DiscardDirty})
		if s, err := mvcc.Open(tiny(faulty)); err == nil {
			_ = s.Close()
		}
		if rule.Fired() == 0 {
			break
		}
		syncs++
		for range 3 { // the log of the first ones is not kept
			mem = mem.Crash(1, vfs.SurviveProcess)
			s := mustOpen(t, tiny(mem))
			mustPut(t, s, "a", "1")
			mustCheckpoint(t, s)
			mustPut(t, s, "b", "2")
			mustClose(t, s)
		}
		after := mustOpen(t, tiny(mem.Crash(1, vfs.SurviveNone)))
		mustHold(t, after, map[string]string{"a": "1", "b": "2"})
		mustClose(t, after)
	}
	if syncs < 3 {
		t.Errorf("a start makes %d syncs of directories", syncs)
	}
}

// TestBulkLoadBeforeAStartOnAFullDisk: the file system needs space to write the superblock again. The store opens, and accepts its
// first commit when that has succeeded.
func TestBulkLoadBeforeAStartOnAFullDisk(t *testing.T) {
	mem := vfs.NewMem()
	s := mustOpen(t, reserving(mem))
	mustPut(t, s, "a", "1")
	mustLoad(t, s, map[string]string{"b": "2"})
	left := mem.Crash(1, vfs.SurviveProcess)
	faulty := vfs.NewFaulty(left)
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Sticky: true, Err: syscall.ENOSPC})
	again := mustOpen(t, reserving(faulty))
	mustHold(t, again, map[string]string{"a": "1", "b": "2"})
	x := mustSession(t, again)
	if _, err := put(x, "c", "3", mvcc.DurabilitySync); !errors.Is(err, vfs.ErrNoSpace) {
		t.Errorf("a put: %v", err)
	}
	x.Close()
	rule.Remove()
	awaitSpace(t, again, "c")
	crashed := left.Crash(1, vfs.SurviveNone)
	_ = again.Close() // it has crashed
	last := mustOpen(t, tiny(crashed))
	mustHold(t, last, map[string]string{"a": "1", "b": "2", "c": "v"})
}
