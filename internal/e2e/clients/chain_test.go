package clients

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

var (
	chainSteps = flag.Int("chain.steps", 25, "commands of TestCommandsUnderKillsDoWhatTheySay")
	chainSeed  = flag.Uint64("chain.seed", 1, "seed of its commands and faults")
)

// chainValue is what the store has under a key.
type chainValue struct {
	Value   string `json:"value"`
	Epoch   uint64 `json:"epoch"`
	Expires uint64 `json:"expires_at_ms"`
	Lease   uint64 `json:"lease_id"`
}

// chainState is what the store has under all keys.
type chainState map[string]chainValue

// chain is a row of commands of kvctl against a server that is killed, stopped and paused meanwhile, and a model of what the store must have.
// A command that succeeds has done what it says; one that fails has done nothing, unless it says that the outcome is unknown: then it has done
// all of it or nothing.
type chain struct {
	t     *testing.T
	s     *server
	p     *proxy
	rng   *rand.Rand
	now   chainState
	past  []chainPast
	lines []string // what was done, for a failure

	token  string     // file of the watch
	seen   chainState // what it has delivered
	backup string     // target

	succeeded, failed, unknown, happened int
}

// chainPast is the state at an epoch.
type chainPast struct {
	epoch uint64
	state chainState
}

// chainWrite is a command that writes.
type chainWrite struct {
	args   []string
	stdin  string
	code   int                                        // if it is executed
	after  chainState                                 // if it is executed; epochs of now are those that it prints
	check  func(out string) (epoch uint64, err error) // of its output; the default is that it prints an epoch
	loose  bool                                       // an error says nothing of the outcome
	values map[string][]string                        // not atomic: each key is as before, or has one of these values
}

// ran is the end of a command.
type ran struct {
	out, errs string
	code      int
}

// kvctl runs a command beside a fault.
func (c *chain) kvctl(stdin string, faulty bool, args ...string) ran {
	c.t.Helper()
	fault := 0
	if faulty {
		fault = max(0, c.rng.IntN(10)-4)
	}
	endpoint := c.s.endpoint
	if fault == 5 {
		endpoint = c.p.endpoint
		c.p.budget.Store(int64(200 + c.rng.IntN(2000)))
	}
	if fault == 2 || fault == 4 && c.rng.IntN(2) == 0 {
		args = withOptions(args, "--timeout", "300ms")
	}
	c.lines = append(c.lines, fmt.Sprintf("fault %d: kvctl %.300q, stdin %.300q", fault, args, stdin))
	cmd := exec.Command(filepath.Join(bin, "kvctl"), args...)
	cmd.Env = append(os.Environ(), "KVCTL_ENDPOINT="+endpoint, "PATH="+bin+":"+os.Getenv("PATH"))
	cmd.Env = append(cmd.Env, c.s.env...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	pause := func(most int) { time.Sleep(time.Duration(c.rng.IntN(most*1000)) * time.Microsecond) }
	switch fault {
	case 2:
		c.s.signal(syscall.SIGKILL)
	case 4:
		_ = c.s.process.Process.Signal(syscall.SIGSTOP)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its state has the exit code
		close(ended)
	}()
	pause(25)
	switch fault {
	case 1:
		c.s.signal(syscall.SIGKILL)
		pause(50)
		c.s.start()
	case 3:
		c.s.signal(syscall.SIGTERM)
		c.s.start()
	case 4:
		if slices.Contains(args, "--timeout") {
			<-ended
			c.s.signal(syscall.SIGKILL)
			c.s.start()
		} else {
			pause(100)
			_ = c.s.process.Process.Signal(syscall.SIGCONT)
		}
	}
	select {
	case <-ended:
	case <-time.After(time.Minute):
		c.t.Fatalf("kvctl %q does not end\n%s", args, strings.Join(c.lines, "\n"))
	}
	switch fault {
	case 2:
		c.s.start()
	case 5: // an attempt may be on its way still
		c.p.budget.Store(0)
		c.p.cutAll()
		c.s.signal(syscall.SIGKILL)
		c.s.start()
	}
	r := ran{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
	c.lines[len(c.lines)-1] += fmt.Sprintf(" -> exit %d, %.200q, %.200q", r.code, r.out, r.errs)
	return r
}

// withOptions adds options to a command, before the words of another one.
func withOptions(args []string, options ...string) []string {
	at := slices.Index(args, "--")
	if at < 0 {
		at = len(args)
	}
	return slices.Concat(args[:at], options, args[at:])
}

// must runs a command without a fault that succeeds.
func (c *chain) must(stdin string, args ...string) string {
	c.t.Helper()
	r := c.kvctl(stdin, false, args...)
	if r.code != 0 {
		c.fail("exit code %d", r.code)
	}
	return r.out
}

func (c *chain) fail(format string, args ...any) {
	c.t.Helper()
	c.t.Fatalf("seed %d: %s\n%s", *chainSeed, fmt.Sprintf(format, args...), strings.Join(c.lines[max(0, len(c.lines)-12):], "\n"))
}

// parse reads an export with epochs.
func (c *chain) parse(export string) chainState {
	c.t.Helper()
	found := chainState{}
	for line := range strings.Lines(export) {
		var r struct {
			Key string `json:"key"`
			chainValue
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			c.fail("%v in %s", err, line)
		}
		found[r.Key] = r.chainValue
	}
	return found
}

func (c *chain) stored() chainState { return c.parse(c.must("", "export", "--epochs")) }

// alike compares states: epochs only where both are known, and of deadlines whether there is one.
func alike(x, y chainState) bool {
	return maps.EqualFunc(x, y, func(a, b chainValue) bool {
		return a.Value == b.Value && (a.Epoch == b.Epoch || a.Epoch == 0 || b.Epoch == 0) && (a.Expires == 0) == (b.Expires == 0) && a.Lease == b.Lease
	})
}

// write executes a command that writes, and finds out what became of it.
func (c *chain) write(w *chainWrite) {
	c.t.Helper()
	if w.code != 0 {
		w.after = c.now
	}
	r := c.kvctl(w.stdin, true, withOptions(w.args, "-o", "jsonl")...)
	switch {
	case r.code == w.code && w.code == 0:
		c.succeeded++
		epoch, err := c.checked(w, r.out)
		if err != nil {
			c.fail("%v", err)
		}
		c.become(w.after, epoch)
	case r.code == w.code:
		c.succeeded++
	case r.code == 6 && strings.Contains(r.errs, `"outcome_unknown":true`), w.loose:
		c.unknown++
		c.findOut(w)
	case r.code == 6:
		c.failed++
		if got := c.stored(); !alike(got, c.now) {
			c.fail("the command says that nothing was written; the store has %v, want %v", got, c.now)
		}
	default:
		c.fail("exit code %d, want %d", r.code, w.code)
	}
}

func (c *chain) checked(w *chainWrite, out string) (uint64, error) {
	if w.check != nil {
		return w.check(out)
	}
	var printed struct {
		Epoch uint64 `json:"epoch"`
	}
	if err := json.Unmarshal([]byte(out), &printed); err != nil {
		return 0, err
	}
	return printed.Epoch, nil
}

// become makes a state that of now; values without an epoch are of the newest commit. Epoch zero is nothing written.
func (c *chain) become(after chainState, epoch uint64) {
	c.t.Helper()
	if epoch == 0 {
		if !alike(after, c.now) {
			c.fail("no epoch is told, and the state should change from %v to %v", c.now, after)
		}
		return
	}
	if n := len(c.past); n > 0 && epoch <= c.past[n-1].epoch {
		c.fail("epoch %d after %d", epoch, c.past[n-1].epoch)
	}
	c.now = maps.Clone(after)
	for k, v := range c.now {
		if v.Epoch == 0 {
			v.Epoch = epoch
			c.now[k] = v
		}
	}
	c.past = append(c.past, chainPast{epoch, c.now})
}

// findOut tells whether a command with an unknown outcome was executed.
func (c *chain) findOut(w *chainWrite) {
	c.t.Helper()
	got := c.stored()
	switch {
	case alike(got, c.now):
		return
	case w.values != nil:
		for key, v := range got {
			if v != c.now[key] && !slices.Contains(w.values[key], v.Value) {
				c.fail("%s is %v, was %v, and was to become %v", key, v, c.now[key], w.values[key])
			}
		}
	case !alike(got, w.after):
		c.fail("the store has %v, want %v or %v", got, c.now, w.after)
	}
	c.happened++
	c.now = got
	c.past = append(c.past, chainPast{c.visible(), got})
}

func (c *chain) visible() uint64 {
	c.t.Helper()
	var status struct {
		Epochs struct {
			Visible uint64 `json:"visible"`
		} `json:"epochs"`
	}
	if err := json.Unmarshal([]byte(c.must("", "status", "-o", "json")), &status); err != nil {
		c.fail("%v", err)
	}
	return status.Epochs.Visible
}

// leased attaches keys to a lease and ends it: the keys are gone.
func (c *chain) leased() {
	c.t.Helper()
	id := strings.TrimSpace(c.must("", "lease", "grant", "1h", "--owner", "chain"))
	lease, err := strconv.ParseUint(id, 10, 64)
	if err != nil {
		c.fail("%v", err)
	}
	for range 2 {
		key, value := c.key(), c.value()
		c.write(&chainWrite{args: []string{"put", key, value, "--lease", id}, after: c.with(func(s chainState) { s[key] = chainValue{Value: value, Lease: lease} })})
	}
	if c.rng.IntN(2) == 0 {
		c.write(c.invoke())
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		r := c.kvctl("", true, "lease", "revoke", id)
		if r.code == 0 || r.code == 3 {
			break
		}
		if r.code != 6 || time.Now().After(deadline) {
			c.fail("exit code %d", r.code)
		}
	}
	c.now = c.with(func(s chainState) { maps.DeleteFunc(s, func(_ string, v chainValue) bool { return v.Lease == lease }) })
	for deadline := time.Now().Add(30 * time.Second); ; { // a revocation that was begun goes on by itself
		got := c.stored()
		if alike(got, c.now) {
			break
		}
		if time.Now().After(deadline) {
			c.fail("after the end of the lease the store has %v, want %v", got, c.now)
		}
	}
	c.past = append(c.past, chainPast{c.visible(), c.now})
}

// read compares what reading commands print.
func (c *chain) read() {
	c.t.Helper()
	key := c.known()
	v, exists := c.now[key]
	prefix := key[:2]
	switch c.rng.IntN(5) {
	case 0:
		r := c.kvctl("", true, "get", key, "-o", "json")
		var got chainValue
		if r.code == 6 {
			return
		}
		if r.code != map[bool]int{false: 3}[exists] || exists && (json.Unmarshal([]byte(r.out), &got) != nil || got.Value != v.Value || got.Epoch != v.Epoch) {
			c.fail("got %+v, want %+v", got, v)
		}
	case 1:
		r := c.kvctl("", true, "export", prefix, "--epochs")
		want := maps.Clone(c.now)
		maps.DeleteFunc(want, func(k string, _ chainValue) bool { return !strings.HasPrefix(k, prefix) })
		if r.code != 6 && (r.code != 0 || !alike(c.parse(r.out), want)) {
			c.fail("exported %s, want %v", r.out, want)
		}
	case 2:
		r := c.kvctl("", true, "scan", "--count", "-o", "raw")
		if r.code != 6 && strings.TrimSpace(r.out) != fmt.Sprint(len(c.now)) {
			c.fail("counted %s, want %d", r.out, len(c.now))
		}
	default:
		if len(c.past) == 0 {
			return
		}
		then := c.past[c.rng.IntN(len(c.past))]
		r := c.kvctl("", true, "export", "--at", fmt.Sprint(then.epoch), "--epochs")
		if r.code != 6 && (r.code != 0 || !alike(c.parse(r.out), then.state)) {
			c.fail("at epoch %d exported %s, want %v", then.epoch, r.out, then.state)
		}
	}
}

// watch takes what has changed since the last time, and compares if nothing disturbs it.
func (c *chain) watch(faulty bool) {
	c.t.Helper()
	want := chainState{}
	for k, v := range c.now {
		want[k] = chainValue{Value: v.Value}
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		c.watchOnce(faulty)
		if faulty || maps.Equal(c.seen, want) {
			return
		}
		if time.Now().After(deadline) {
			c.fail("the watch has delivered %v, want %v", c.seen, want)
		}
	}
}

func (c *chain) watchOnce(faulty bool) {
	c.t.Helper()
	r := c.kvctl("", faulty, "watch", "--snapshot", "--from-token", c.token, "--timeout", "500ms", "-o", "jsonl")
	if r.code != 6 {
		c.fail("exit code %d", r.code)
	}
	for line := range strings.Lines(r.out) {
		var e struct {
			Change string `json:"change"`
			Key    string `json:"key"`
			Value  string `json:"value"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			c.fail("%v: %s", err, line)
		}
		switch e.Change {
		case "begin":
			clear(c.seen)
		case "delete":
			delete(c.seen, e.Key)
		default:
			c.seen[e.Key] = chainValue{Value: e.Value}
		}
	}
}

// offline looks at the files of the server, which is stopped.
func (c *chain) offline() {
	c.t.Helper()
	c.s.signal(syscall.SIGTERM)
	c.must("", "verify", "--data-dir", c.s.data())
	c.salvaged(c.s.data())
	c.s.start()
}

// salvaged compares what salvage finds in a directory.
func (c *chain) salvaged(dir string) {
	c.t.Helper()
	out := filepath.Join(c.t.TempDir(), "salvaged")
	c.must("", "salvage", "--data-dir", dir, "--out", out)
	text, err := os.ReadFile(out)
	if err != nil {
		c.fail("%v", err)
	}
	if got := c.parse(string(text)); !alike(got, c.now) {
		c.fail("salvaged %v, want %v", got, c.now)
	}
}

// backUp makes a backup, restores it, and compares.
func (c *chain) backUp() {
	c.t.Helper()
	args := []string{"backup", "create", "--to", c.backup, "--base", "latest"}
	if c.kvctl("", true, args...).code != 0 {
		return
	}
	c.must("", "backup", "verify", "--from", c.backup)
	restored := filepath.Join(c.t.TempDir(), "restored")
	c.must("", "restore", "--from", c.backup, "--latest", "--data-dir", restored)
	c.salvaged(restored)
	if err := os.RemoveAll(restored); err != nil {
		c.fail("%v", err)
	}
}

func (c *chain) do() {
	c.t.Helper()
	switch n := c.rng.IntN(100); {
	case n < 20:
		c.write(c.put())
	case n < 30:
		c.write(c.del())
	case n < 45:
		c.write(c.invoke())
	case n < 60:
		c.write(c.script())
	case n < 68:
		c.write(c.restoreKey())
	case n < 74:
		c.write(c.imported())
	case n < 78:
		c.write(c.locked())
	case n < 80:
		c.leased()
	case n < 94:
		c.read()
	case n < 97:
		c.watch(c.rng.IntN(2) == 0)
	case n < 99:
		c.offline()
	default:
		c.backUp()
	}
}

// TestCommandsUnderKillsDoWhatTheySay: random commands of kvctl, while the server is killed, stopped or paused, or the connection breaks.
func TestCommandsUnderKillsDoWhatTheySay(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--retention", "1h")
	c := &chain{
		t: t, s: s, p: startProxy(t, s.endpoint), rng: rand.New(rand.NewPCG(*chainSeed, 1)), now: chainState{}, seen: chainState{},
		token: filepath.Join(t.TempDir(), "token"), backup: t.TempDir(),
	}
	for range *chainSteps {
		c.do()
	}
	if got := c.stored(); !alike(got, c.now) {
		c.fail("at the end the store has %v, want %v", got, c.now)
	}
	c.watch(false)
	c.offline()
	t.Logf("%d writes succeeded, %d failed, %d had an unknown outcome, of which %d had happened", c.succeeded, c.failed, c.unknown, c.happened)
	if c.succeeded == 0 {
		t.Error("the test tests little")
	}
}
