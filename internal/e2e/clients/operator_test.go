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
