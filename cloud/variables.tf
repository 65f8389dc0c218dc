variable "region" {
  description = "AWS region of everything."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Prefix of what has no name of its own. Queues are named after their machines."
  type        = string
  default     = "cleanrl"
}

variable "instance_types" {
  description = "Machines to offer. Each gets two queues: c5a.large gives c5a-large and c5a-large-spot."
  type        = set(string)
  default     = ["c5a.large", "m6gd.medium", "g4dn.xlarge"]
}

variable "max_vcpus" {
  description = "CPUs that a queue may use at once. Nothing runs, and nothing is paid, while it is empty."
  type        = number
  default     = 256
}

variable "secret_names" {
  description = "Variables whose values AWS Secrets Manager keeps and hands to containers."
  type        = set(string)
  default     = ["WANDB_API_KEY"]
}

variable "shared_runs" {
  description = "Make a file system for the runs: a run whose machine is taken away then goes on."
  type        = bool
  default     = true
}

variable "subnet_ids" {
  description = "Subnets of the machines; empty: those of the account's default network."
  type        = list(string)
  default     = []
}
