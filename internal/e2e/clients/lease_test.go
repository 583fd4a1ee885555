package clients

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

var leaseFor = flag.Duration("lease.for", 2*time.Second, "how long holders of a lock work under kills of the server")

// TestFencedWritesOfOneHolderAtATimeUnderKills: clients take a lock in turn and append to a journal with its fence, while
// the server is killed and started again. Some stop their keep-alives and go on writing, as a process that was paused does.
// The journal has the tokens in ascending order, and every write that was acknowledged.
func TestFencedWritesOfOneHolderAtATimeUnderKills(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	ctx, stop := context.WithTimeout(t.Context(), *leaseFor)
	defer stop()
	var mu sync.Mutex
	var acknowledged []string
	var holders sync.WaitGroup
	for i := range 4 {
		c := s.dial(s.endpoint)
		holders.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			for ctx.Err() == nil {
				written, err := holdOnce(ctx, c, rng.IntN(3) == 0)
				mu.Lock()
				acknowledged = append(acknowledged, written...)
				mu.Unlock()
				if err != nil {
					time.Sleep(10 * time.Millisecond) // the server may be away
				}
			}
		})
	}
	for ctx.Err() == nil {
		time.Sleep(400 * time.Millisecond)
		s.signal(syscall.SIGKILL)
		s.start()
	}
	holders.Wait()
	v, err := s.dial(s.endpoint).Get(t.Context(), []byte("journal"))
	if err != nil {
		t.Fatal(err)
	}
	checkJournal(t, string(v.Data), acknowledged)
}

// holdOnce takes the lock and appends to the journal some times. An abandoned lease is not kept alive meanwhile.
func holdOnce(ctx context.Context, c *client.Client, abandoned bool) (acknowledged []string, _ error) {
	lease, err := c.GrantLease(ctx, time.Second, "test")
	if err != nil {
		return nil, err
	}
	defer func() { _ = lease.Close(ctx) }() // its deadline ends it otherwise
	lock, err := c.Lock(ctx, []byte("journal"), lease, nil)
	if err != nil {
		return nil, err
	}
	if abandoned {
		_ = c.RevokeLease(ctx, lease.ID()) // as if its deadline had passed, unnoticed
	}
	for n := range 10 {
		entry := fmt.Sprintf("%d-%d", lock.Token(), n)
		_, _, err := c.Invoke(ctx, client.Append([]byte("journal"), []byte(entry+" ")), client.If(lock.Fence()))
		if err != nil {
			return acknowledged, err
		}
		acknowledged = append(acknowledged, entry)
	}
	return acknowledged, lock.Release(ctx)
}

func checkJournal(t *testing.T, journal string, acknowledged []string) {
	t.Helper()
	seen, last := map[string]bool{}, 0
	for _, entry := range strings.Fields(journal) {
		var token, n int
		if _, err := fmt.Sscanf(entry, "%d-%d", &token, &n); err != nil {
			t.Fatal(err)
		}
		if token < last {
			t.Errorf("%s after a write with token %d: two holders at once", entry, last)
		}
		if seen[entry] {
			t.Errorf("%s is there twice", entry)
		}
		seen[entry], last = true, token
	}
	for _, entry := range acknowledged {
		if !seen[entry] {
			t.Errorf("%s was acknowledged, and is not in the journal", entry)
		}
	}
	if len(acknowledged) == 0 {
		t.Error("no holder has written anything")
	}
	t.Logf("%d entries, %d acknowledged", len(seen), len(acknowledged))
}

// TestCandidatesLeadInTurn uses two candidates in one process.
func TestCandidatesLeadInTurn(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c, ctx := s.dial(s.endpoint), t.Context()
	var candidates []*client.Election
	var leases []*client.Lease
	for range 2 {
		lease, err := c.GrantLease(ctx, time.Minute, "test")
		if err != nil {
			t.Fatal(err)
		}
		leases, candidates = append(leases, lease), append(candidates, c.Election([]byte("e"), lease))
	}
	first, err := candidates[0].Campaign(ctx, []byte("0"))
	if err != nil {
		t.Fatal(err)
	}
	if lock, holder, err := c.TryLock(ctx, []byte("e"), leases[1], nil); err != nil || lock != nil || holder.Token != first.Token() {
		t.Fatalf("%+v, %+v, %v", lock, holder, err)
	}
	elected := make(chan error, 1)
	go func() { _, err := candidates[1].Campaign(ctx, []byte("1")); elected <- err }()
	var seen []string
	for leader, err := range candidates[0].Observe(ctx) {
		if err != nil {
			t.Fatal(err)
		}
		if seen = append(seen, string(leader.Value)); string(leader.Value) == "1" {
			break
		}
		if string(leader.Value) == "0" {
			if err := candidates[0].Resign(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := <-elected; err != nil || seen[0] != "0" {
		t.Fatalf("%q, %v", seen, err)
	}
	if leader, err := candidates[1].Leader(ctx); err != nil || string(leader.Value) != "1" || leader.Token <= first.Token() {
		t.Fatalf("%+v, %v", leader, err)
	}
	for _, lease := range leases {
		if err := lease.Close(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

var lockCancels = flag.Int("lock.cancels", 2_000, "callers of Lock that are cancelled")

// TestCancelledLockLeavesNoLock: callers of Lock are cancelled while they wait, while the answer is on its way, and right after, and
// others use the lock in between. Soon after the last of them has gone the lock is free, although all leases live.
func TestCancelledLockLeavesNoLock(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	const callers = 8
	name := []byte("cancelled")
	var all sync.WaitGroup
	acquired, left := make([]int, callers), make([]int, callers)
	for n := range callers {
		lease, err := c.GrantLease(t.Context(), time.Minute, "test")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = lease.Close(context.Background()) })
		all.Go(func() {
			rng := rand.New(rand.NewPCG(3, uint64(n)))
			for range *lockCancels / callers {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(3000))*time.Microsecond)
				lock, err := c.Lock(ctx, name, lease, nil)
				cancel()
				if err != nil {
					left[n]++
					continue
				}
				acquired[n]++
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	last, err := c.GrantLease(t.Context(), time.Minute, "last")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = last.Close(context.Background()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := c.Lock(ctx, name, last, nil); err != nil {
		t.Fatalf("the lock is held by a caller that has gone: %v; acquired %v times, cancelled %v times", err, acquired, left)
	}
	t.Logf("acquired %v, cancelled %v", acquired, left)
}

// TestLeaseIsKeptAliveAndLostWhenTheServerIsAway uses the Go client.
func TestLeaseIsKeptAliveAndLostWhenTheServerIsAway(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	ctx := t.Context()
	lease, err := c.GrantLease(ctx, time.Second, "test")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(ctx, []byte("k"), nil, client.Attach(lease)); err != nil {
		t.Fatal(err)
	}
	leader, err := c.Election([]byte("e"), lease).Campaign(ctx, []byte("here"))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(1500 * time.Millisecond) // kept alive
	if v, err := c.Get(ctx, []byte("k")); err != nil || !v.Found {
		t.Fatalf("%+v, %v", v, err)
	}
	if h, err := c.LockHolder(ctx, []byte("e")); err != nil || h.Token != leader.Token() || string(h.Value) != "here" {
		t.Fatalf("%+v, %v", h, err)
	}
	s.signal(syscall.SIGKILL)
	select {
	case <-lease.Lost():
	case <-time.After(20 * time.Second):
		t.Fatal("the server is away, and the lease is not lost")
	}
	s.start()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		v, err := c.Get(ctx, []byte("k"))
		if err == nil && !v.Found {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the key of a lease that was lost: %+v, %v", v, err)
		}
	}
	_, err = c.Put(ctx, []byte("late"), nil, client.If(leader.Fence()))
	if !errors.Is(err, client.ErrFenced) {
		t.Fatalf("a write of a leader that was deposed: %v", err)
	}
}

// TestKvctlLockRunsOneCommandAtATime has commands that fail if two of them run at once, and looks at exit codes.
func TestKvctlLockRunsOneCommandAtATime(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	dir := filepath.Join(t.TempDir(), "held")
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			_, stderr, code := s.kvctl("", "lock", "job", "--", "sh", "-c", `mkdir "$0" && sleep 0.02 && rmdir "$0" && exit 7`, dir)
			if code != 7 {
				t.Errorf("exit code %d, %s", code, stderr)
			}
		})
	}
	all.Wait()
	holder := exec.Command(filepath.Join(bin, "kvctl"), "lock", "--ttl", "1s", "job", "--", "sh", "-c", "trap 'exit 3' TERM; echo held; while :; do sleep 0.01; done")
	holder.Env = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...)
	out, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := s.kvctl("", "lock", "--wait", "50ms", "job", "--", "true"); code != 4 {
		t.Errorf("a lock that is held: exit code %d, %s", code, stderr)
	}
	if err := holder.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // the exit code tells
	if code := holder.ProcessState.ExitCode(); code != 3 {
		t.Errorf("a command that a signal has ended: exit code %d", code)
	}
	if stdout, stderr, code := s.kvctl("", "lock", "job", "--", "sh", "-c", "echo $KVCTL_LOCK_NAME; sleep 0.1; kill -KILL $$"); code != 128+9 || stdout != "job\n" {
		t.Errorf("exit code %d, %s%s", code, stdout, stderr)
	}
}

// TestKvctlKeepsALeaseAliveBesideAServerThatStandsStill for longer than a request may take, and for less than the lease lives.
func TestKvctlKeepsALeaseAliveBesideAServerThatStandsStill(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := s.dial(s.endpoint)
	const ttl = 12 * time.Second
	id, err := c.GrantLeaseOnce(t.Context(), ttl, "a test")
	if err != nil {
		t.Fatal(err)
	}
	remaining := func() time.Duration {
		found, err := c.LeaseInfo(t.Context(), id, 0)
		if err != nil {
			t.Fatal(err)
		}
		return found.GetLease().GetRemaining().AsDuration()
	}
	keeper := exec.Command(filepath.Join(bin, "kvctl"), "lease", "keep-alive", "--timeout", "1s", strconv.FormatUint(id, 10))
	keeper.Env = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...)
	const old = ttl - time.Second // what is left without a keep-alive, here and after the pause
	for remaining() > old {
		time.Sleep(10 * time.Millisecond)
	}
	startProcess(t, keeper)
	for remaining() <= old {
		time.Sleep(10 * time.Millisecond)
	}
	if err := s.process.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(ttl/3 + 2*time.Second) // the next keep-alive fails
	if err := s.process.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for remaining() <= old {
		time.Sleep(10 * time.Millisecond)
	}
}

// TestKvctlLockPassesOnThatACommandEndedWell, also after a signal, and if the lock cannot be released.
func TestKvctlLockPassesOnThatACommandEndedWell(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	running := filepath.Join(t.TempDir(), "running")
	holder := exec.Command(filepath.Join(bin, "kvctl"), "lock", "job", "--", "sh", "-c", `trap 'exit 0' TERM; : > "$0"; while :; do sleep 0.01; done`, running)
	holder.Env = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...)
	ended := startProcess(t, holder)
	waitForFile(t, running, ended)
	if err := holder.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ended
	if code := holder.ProcessState.ExitCode(); code != 0 {
		t.Errorf("a command that ended well after a signal: exit code %d", code)
	}
	_, stderr, code := s.kvctl("", "lock", "--timeout", "1s", "job", "--", "kill", "-KILL", strconv.Itoa(s.process.Process.Pid))
	if code != 0 || !strings.Contains(stderr, "could not be released") {
		t.Errorf("a lock that cannot be released: exit code %d, %s", code, stderr)
	}
}

// TestKvctlLockEndsItsCommandWhateverItsMessagesDo: the reader of standard error has ended, or takes nothing. A command that ignores
// SIGTERM gets SIGKILL.
func TestKvctlLockEndsItsCommandWhateverItsMessagesDo(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(reader, writer *os.File) error{
		"ended": func(reader, _ *os.File) error { return reader.Close() },
		"full": func(_, writer *os.File) error {
			if err := writer.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
				return err
			}
			for {
				if _, err := writer.Write(make([]byte, 4096)); errors.Is(err, os.ErrDeadlineExceeded) {
					return nil
				} else if err != nil {
					return err
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t)
			reader, writer, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = reader.Close(), writer.Close() }()
			if err := leave(reader, writer); err != nil {
				t.Fatal(err)
			}
			running := filepath.Join(t.TempDir(), "running")
			holder := exec.Command(filepath.Join(bin, "kvctl"), "lock", "--ttl", "1s", "--kill-after", "1s", "job", "--", "sh", "-c",
				`exec 2> /dev/null; trap '' TERM; echo $$ > "$0.new"; mv "$0.new" "$0"; while :; do sleep 0.01; done`, running)
			holder.Env, holder.Stderr = append(append(os.Environ(), "KVCTL_ENDPOINT="+s.endpoint), s.env...), writer
			ended := startProcess(t, holder)
			waitForFile(t, running, ended)
			text, err := os.ReadFile(running)
			if err != nil {
				t.Fatal(err)
			}
			command, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = syscall.Kill(command, syscall.SIGKILL) }()
			s.signal(syscall.SIGKILL)
			for until := time.Now().Add(startMax); syscall.Kill(command, 0) == nil; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(until) {
					t.Fatal("the command goes on without the lock")
				}
			}
		})
	}
}

// startProcess starts a process that is killed at the end of the test. The channel is closed when it has ended.
func startProcess(t *testing.T, c *exec.Cmd) (ended chan struct{}) {
	t.Helper()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended = make(chan struct{})
	go func() {
		_ = c.Wait() // the exit code tells
		close(ended)
	}()
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		<-ended
	})
	return ended
}

// waitForFile waits until a process has made a file.
func waitForFile(t *testing.T, name string, ended chan struct{}) {
	t.Helper()
	for _, err := os.Stat(name); err != nil; _, err = os.Stat(name) {
		select {
		case <-ended:
			t.Fatal("the command was not run")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestKvctlLockEndsItsCommandWhenTheLockIsLost kills the server once the command runs: others see the lock as held before kvctl has
// its answer.
func TestKvctlLockEndsItsCommandWhenTheLockIsLost(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	running, done := filepath.Join(t.TempDir(), "running"), make(chan string, 1)
	go func() {
		stdout, stderr, code := s.kvctl("", "lock", "--ttl", "1s", "--timeout", "1s", "job", "--", "sh", "-c",
			`trap 'echo term; exit 0' TERM; : > "$0"; while :; do sleep 0.01; done`, running)
		done <- fmt.Sprint(code, " ", stdout, stderr)
	}()
	for _, err := os.Stat(running); err != nil; _, err = os.Stat(running) {
		if time.Sleep(10 * time.Millisecond); len(done) > 0 {
			t.Fatalf("the command was not run: %s", <-done)
		}
	}
	s.signal(syscall.SIGKILL)
	if got := <-done; !strings.HasPrefix(got, "4 term\n") {
		t.Errorf("%s", got)
	}
}
