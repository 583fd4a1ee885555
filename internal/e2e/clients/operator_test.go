package clients

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/client"
)

// A second server on a directory names the process that uses it, so that an operator need not look
// for it.
func TestSecondServerNamesTheFirst(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	second := exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", filepath.Join(s.dir, "data"), "--listen", "127.0.0.1:0", "--http", "")
	out, err := second.CombinedOutput()
	if err == nil || second.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), fmt.Sprintf("locked by process %d", s.process.Process.Pid)) {
		t.Errorf("%v: %s", err, out)
	}
}

// A closed terminal sends SIGHUP.
func TestHangupDoesNotStopTheServer(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	for range 10 {
		if err := s.process.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		if _, stderr, code := s.kvctl("", "put", "k", "v"); code != 0 {
			t.Fatal(stderr)
		}
	}
	if code := s.signal(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// SIGHUP replaces certificates. The files keep size, inode and time, so that the server does not find the change
// by itself, and are those that a Kubernetes secret has: without the key of the authority.
func TestHangupReplacesCertificates(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	mustReplace := func(authority string) {
		t.Helper()
		if out, err := exec.Command(filepath.Join(bin, "kvctl"), "tls", "init", in(authority)).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, name := range []string{"ca.crt", "server.crt", "server.key"} {
			text, err := os.ReadFile(in(authority, name))
			text = append(text, bytes.Repeat([]byte("\n"), 1024-len(text))...)
			if err := errors.Join(err, os.WriteFile(in(name), text, 0o600), os.Chtimes(in(name), time.Unix(1, 0), time.Unix(1, 0))); err != nil {
				t.Fatal(err)
			}
		}
	}
	using := func(authority string) []string {
		return []string{"--tls-ca", in(authority, "ca.crt"), "--tls-cert", in(authority, "client.crt"), "--tls-key", in(authority, "client.key")}
	}
	mustReplace("first")
	s := &server{
		t: t, dir: t.TempDir(), endpoint: freeAddress(t),
		args:   []string{"--tls-cert", in("server.crt"), "--tls-key", in("server.key"), "--tls-client-ca", in("ca.crt"), "--tls-client-auth", "require"},
		dialed: []client.Option{client.WithTLSFiles(client.TLSFiles{CA: in("first", "ca.crt"), Cert: in("first", "client.crt"), Key: in("first", "client.key")})},
	}
	s.start()
	t.Cleanup(func() { s.signal(syscall.SIGKILL) })
	mustReplace("second")
	if _, stderr, code := s.kvctl("", append(using("second"), "put", "k", "v")...); code == 0 || !strings.Contains(stderr, "does not trust") {
		t.Errorf("before the signal: exit %d, %s", code, stderr)
	}
	if err := s.process.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	stderr, code := "", 1
	for deadline := time.Now().Add(startMax); code != 0 && time.Now().Before(deadline); {
		_, stderr, code = s.kvctl("", append(using("second"), "put", "k", "v")...)
	}
	if code != 0 {
		t.Errorf("after the signal: %s", stderr)
	}
	if _, _, code := s.kvctl("", append(using("first"), "put", "k", "v")...); code == 0 {
		t.Error("the certificates before are in force")
	}
	if code := s.signal(syscall.SIGTERM); code != 0 || strings.Count(s.log.text(), `msg="certificates loaded" changed=true`) != 1 {
		t.Errorf("exit %d: %s", code, s.log.text())
	}
}

// A server whose log goes to a pipe outlives what reads the pipe, and stops cleanly when it is told to.
func TestEndOfTheLogsReaderDoesNotStopTheServer(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", t.TempDir(), "--listen", "127.0.0.1:0", "--http", "", "--memory", "256MiB")
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = writer, writer
	if err := errors.Join(cmd.Start(), writer.Close()); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	for buf := make([]byte, 4096); !strings.Contains(log.String(), "msg=serving"); {
		n, err := reader.Read(buf)
		log.Write(buf[:n])
		if err != nil {
			break
		}
	}
	if err := errors.Join(reader.Close(), cmd.Process.Signal(syscall.SIGTERM)); err != nil { // it logs that it drains
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v; the log until then: %s", err, log.String())
	}
}

// A server whose log goes to a pipe that is not read any more, and is full, answers requests and operators, says that it is well, and stops
// cleanly when it is told to.
func TestALogThatIsNotReadDoesNotStopTheServer(t *testing.T) {
	t.Parallel()
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	s := &server{t: t, dir: t.TempDir(), endpoint: freeAddress(t)}
	cmd := exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", filepath.Join(s.dir, "data"), "--listen", s.endpoint, "--http", "", "--memory", "64MiB")
	cmd.Stderr = writer
	const pipeBytes = 4096
	if _, err := unix.FcntlInt(writer.Fd(), unix.F_SETPIPE_SZ, pipeBytes); err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Write(bytes.Repeat([]byte("x"), pipeBytes)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(cmd.Start(), writer.Close()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	reached := false
	for deadline := time.Now().Add(startMax); !reached && time.Now().Before(deadline); {
		_, _, code := s.kvctl("", "health", "--timeout", "1s")
		reached = code == 0
	}
	if !reached {
		t.Fatal("the server does not serve")
	}
	for _, args := range [][]string{{"put", "k", "v"}, {"get", "k"}, {"config", "reload"}, {"slow"}, {"health"}} {
		if _, stderr, code := s.kvctl("", append(args, "--timeout", "30s")...); code != 0 {
			t.Errorf("%v: %s", args, stderr)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(startMax):
		t.Error("the server does not stop")
	}
}

// What the server creates is for its own account, whatever the umask is.
func TestDataIsPrivate(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	if _, stderr, code := s.kvctl("", "put", "k", "v"); code != 0 {
		t.Fatal(stderr)
	}
	if _, stderr, code := s.kvctl("", "checkpoint"); code != 0 {
		t.Fatal(stderr)
	}
	files := 0
	err := filepath.WalkDir(filepath.Join(s.dir, "data"), func(name string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Stat(name)
		if err != nil {
			return err
		}
		if files++; info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has %v", name, info.Mode())
		}
		return nil
	})
	if err != nil || files < 5 {
		t.Errorf("%d files, %v", files, err)
	}
}

// Tools that work on files do not change a directory that has no store.
func TestOfflineToolsDoNotChangeOtherDirectories(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"verify"}, {"salvage", "--out", filepath.Join(t.TempDir(), "out")}, {"repair-log", "--yes"}} {
		dir := t.TempDir()
		cmd := exec.Command(filepath.Join(bin, "kvctl"), append(args, "--data-dir", dir)...)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "no store") {
			t.Errorf("%s: %v, %s", args[0], err, out)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
			t.Errorf("%s left %v, %v", args[0], entries, err)
		}
	}
}

// A Service named kvserver in the server's namespace puts variables into its environment that look
// like options.
func TestServerStartsNextToAKubernetesServiceOfItsName(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", t.TempDir(), "--listen", "127.0.0.1:0", "--http", "")
	cmd.Env = append(os.Environ(), "KVSERVER_SERVICE_HOST=10.0.0.7", "KVSERVER_PORT=tcp://10.0.0.7:7400", "KVSERVER_SERVICE_PORT_GRPC=7400")
	var log bytes.Buffer
	reader, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for buf := make([]byte, 4096); !strings.Contains(log.String(), "msg=serving"); {
		n, err := reader.Read(buf)
		log.Write(buf[:n])
		if err != nil {
			break
		}
	}
	_ = cmd.Process.Signal(syscall.SIGKILL)
	_ = cmd.Wait() // it was killed
	if !strings.Contains(log.String(), "msg=serving") || !strings.Contains(log.String(), "KVSERVER_SERVICE_PORT_GRPC") {
		t.Errorf("the log: %s", log.String())
	}
}

// kvctl sends every value that the server accepts: the limit is the server's and not one of kvctl's
// own.
func TestKvctlTakesTheServersLimitOfValues(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--max-value-size", "17MiB")
	value := strings.Repeat("v", 17<<20)
	if _, stderr, code := s.kvctl(value, "put", "large", "-"); code != 0 {
		t.Fatal(stderr)
	}
	if _, stderr, code := s.kvctl(value+"v", "put", "larger", "-"); code == 0 || !strings.Contains(stderr, "17.0 MiB") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	exported, stderr, code := s.kvctl("", "export")
	if code != 0 {
		t.Fatal(stderr)
	}
	for _, flags := range [][]string{nil, {"--bulk"}} {
		if _, stderr, code := s.kvctl(exported, append([]string{"import", "-"}, flags...)...); code != 0 {
			t.Errorf("import %v: %s", flags, stderr)
		}
	}
}
