package main

import (
	"bytes"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// kinds are the objects that a manifest may have, with their API versions.
var kinds = map[string]func() any{
	"v1 Service":          func() any { return new(corev1.Service) },
	"apps/v1 StatefulSet": func() any { return new(appsv1.StatefulSet) },
}

// checkManifest decodes each document strictly: an unknown field, or a value of the wrong type, is an error.
func checkManifest(path string) error {
	data, err := read(path)
	if err != nil {
		return err
	}
	objects := map[string]any{}
	for i, document := range bytes.Split(data, []byte("\n---\n")) {
		var head struct{ APIVersion, Kind string }
		if err := yaml.Unmarshal(document, &head); err != nil {
			return fmt.Errorf("document %d: %w", i, err)
		}
		name := head.APIVersion + " " + head.Kind
		object := kinds[name]
		if object == nil {
			return fmt.Errorf("document %d is a %q, which this check does not know", i, name)
		}
		into := object()
		if err := yaml.UnmarshalStrict(document, into); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		objects[head.Kind] = into
	}
	service, _ := objects["Service"].(*corev1.Service)
	set, _ := objects["StatefulSet"].(*appsv1.StatefulSet)
	if service == nil || set == nil {
		return errNothing
	}
	return checkReferences(service, set)
}

// checkReferences checks what names refer to: labels, ports and volumes.
func checkReferences(service *corev1.Service, set *appsv1.StatefulSet) error {
	pod := &set.Spec.Template
	for _, selector := range []map[string]string{service.Spec.Selector, set.Spec.Selector.MatchLabels} {
		for k, v := range selector {
			if pod.Labels[k] != v {
				return fmt.Errorf("a selector asks for %s=%s, which pods do not have", k, v)
			}
		}
	}
	if set.Spec.ServiceName != service.Name {
		return fmt.Errorf("the set names the service %q, which is %q", set.Spec.ServiceName, service.Name)
	}
	volumes := map[string]bool{}
	for i := range pod.Spec.Volumes {
		volumes[pod.Spec.Volumes[i].Name] = true
	}
	for i := range set.Spec.VolumeClaimTemplates {
		volumes[set.Spec.VolumeClaimTemplates[i].Name] = true
	}
	ports := map[string]bool{}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				return fmt.Errorf("container %s mounts %q, which is no volume", c.Name, m.Name)
			}
		}
		for _, p := range c.Ports {
			ports[fmt.Sprint(p.ContainerPort)] = true
		}
	}
	for _, p := range service.Spec.Ports {
		if !ports[fmt.Sprint(p.Port)] {
			return fmt.Errorf("the service forwards port %d, which no container has", p.Port)
		}
	}
	return nil
}
