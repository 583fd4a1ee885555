package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/client/clienttest"
)

// makeNode makes a pipe, or a device like /dev/null.
func makeNode(t *testing.T, device bool) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "node")
	if !device {
		if err := syscall.Mkfifo(name, 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	if err := syscall.Mknod(name, syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Skipf("only root can make a device: %v", err)
	}
	if err := os.Chmod(name, 0o666); err != nil {
		t.Fatal(err)
	}
	if file, err := os.OpenFile(name, os.O_RDWR, 0); err != nil {
		t.Skipf("devices cannot be used here: %v", err)
	} else if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	return name
}

func modeOf(t *testing.T, name string) fs.FileMode {
	t.Helper()
	info, err := os.Lstat(name)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

// TestFilesReplaceFilesOnly: an export to a pipe, or by root to /dev/null, put a file in its place.
func TestFilesReplaceFilesOnly(t *testing.T) {
	server := clienttest.Start(t)
	for what, device := range map[string]bool{"pipe": false, "device": true} {
		t.Run(what, func(t *testing.T) {
			node := makeNode(t, device)
			link := filepath.Join(t.TempDir(), "link")
			if err := os.Symlink(node, link); err != nil {
				t.Fatal(err)
			}
			before := modeOf(t, node)
			for _, name := range []string{node, link} {
				for _, args := range [][]string{{"export", "--file", name}, {"watch", "--after", "0", "--from-token", name}} {
					var errs bytes.Buffer
					a := &app{in: strings.NewReader(""), out: &bytes.Buffer{}, err: &errs, getenv: func(string) string { return "" }}
					if code := a.run(t.Context(), append(args, "--endpoint", server.Endpoint)); code != exitError || !strings.Contains(errs.String(), "not a regular file") {
						t.Errorf("%v: exit code %d, %s", args, code, errs.String())
					}
				}
				if err := writeToken(name, []byte("token")); err == nil {
					t.Error("a token replaces the node")
				}
			}
			if after := modeOf(t, node); after != before {
				t.Errorf("%v became %v", before, after)
			}
		})
	}
}

// TestALinkLeadsToTheFileThatIsReplaced, and stays a link.
func TestALinkLeadsToTheFileThatIsReplaced(t *testing.T) {
	server := clienttest.Start(t)
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.Symlink("file", link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	a := &app{in: strings.NewReader(""), out: &bytes.Buffer{}, err: &bytes.Buffer{}, getenv: func(string) string { return "" }}
	if code := a.run(t.Context(), []string{"export", "--file", link, "--endpoint", server.Endpoint}); code != exitOK {
		t.Fatalf("exit code %d", code)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) == "old" || modeOf(t, link)&fs.ModeSymlink == 0 {
		t.Errorf("%q, %v, %v", text, err, modeOf(t, link))
	}
	if mode := modeOf(t, file); mode != 0o600 { // what was private stays it
		t.Errorf("the file has mode %v", mode)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestAHistoryThatIsADeviceKeepsItsMode: with KVCTL_HISTORY=/dev/null, the shell of root took /dev/null from all other accounts.
func TestAHistoryThatIsADeviceKeepsItsMode(t *testing.T) {
	node := makeNode(t, true)
	t.Setenv(historyEnv, node)
	a := &app{out: &bytes.Buffer{}, err: &bytes.Buffer{}}
	terminal, err := newTerminal(a, &statements{app: a, ctx: t.Context()})
	if err != nil {
		t.Fatal(err)
	}
	before := modeOf(t, node)
	if err := terminal.close(); err != nil {
		t.Fatal(err)
	}
	if after := modeOf(t, node); after != before {
		t.Errorf("%v became %v", before, after)
	}
}

// TestContextsInADeviceAreNone: KVCTL_CONFIG=/dev/null is a usual way to have no contexts. It was refused, with the advice to take the
// rights of others to /dev/null.
func TestContextsInADeviceAreNone(t *testing.T) {
	node := makeNode(t, true)
	a := &app{getenv: func(name string) string { return map[string]string{contextsEnv: node}[name] }}
	if all, err := a.readContexts(); err != nil || len(all.Contexts) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	if err := a.writeContexts(&contexts{}); err == nil {
		t.Error("contexts are written to a device")
	}
}
